"""What own rules can do: every way of giving one, in every transform, in both backends.

A cell that is not named here works, with the numbers of the way's closed form. One that does not
is named with the error that it raises. `python tests/support_matrix.py` writes the table of the
docs; `test_support_matrix.py` runs every cell, `test_both_support_table.py` compares the table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from support_transforms import BOTH, Transform
from support_ways import WAYS, Way

TABLE = Path(__file__).parents[1] / "docs" / "own-rules-support.md"


@dataclass(frozen=True)
class Refusal:
    """Cells that raise.

    Attributes:
        reason: Why, in the table's words.
        error: The name of the error's type.
        words: A pattern that its message has.
        transforms: Patterns of the transforms' names.
        ways: Patterns of the ways' names.
        backend: Where; None for both.
        bug: Whether gradtools should not refuse, or should refuse by another error.
    """

    reason: str
    error: str
    words: str
    transforms: tuple[str, ...]
    ways: tuple[str, ...] = ("*",)
    backend: str | None = None
    bug: bool = False

    def holds(self, backend: str, transform: Transform, way: Way) -> bool:
        """Whether this cell is one of them."""
        return (
            self.backend in (None, backend)
            and any(fnmatchcase(transform.name, p) for p in self.transforms)
            and any(fnmatchcase(way.name, p) for p in self.ways)
        )


_BEYOND = Refusal(
    "the last kernel of the chain has no rule",
    "MissingRuleError",
    "has no rule, so its derivative is unknown",
    ("*",),
)
_NO_COMPILED_DOUBLE_BACKWARD = Refusal(
    "PyTorch has no compiled double backward (torch#91469)",
    "GradtoolsError",
    r"no compiled double backward \(pytorch#91469\)",
    ("second order of a compiled value",),
    backend="torch",
)
_DOUBLE_BACKWARD_ONLY = ("host: double backward*",)
_KERNEL_RULES = ("host: calls itself", "host: saves the output", "host: framework rule")
_CALLED_BACK = ("host: d*", "host: calls itself", "host: saves the output")


def _bug(reason: str, transforms: tuple[str, ...], ways: tuple[str, ...], backend: str) -> Refusal:
    return Refusal(reason, "", "", transforms, ways, backend, bug=True)


BUGS = (
    _bug(
        "the check for missing rules runs at a level of functorch that has ended",
        ("native second order f*", "native third order f*", "native third order rff"),
        ("host: calls itself", "host: saves the output"),
        "torch",
    ),
    _bug(
        "forward mode of a kernel's maps under vmap",
        ("vmap(jvp)", "vmap(second order fr)"),
        (*_DOUBLE_BACKWARD_ONLY, "host: calls itself", "host: framework rule"),
        "torch",
    ),
    _bug(
        "forward mode of a kernel's maps under vmap",
        ("jvp(vmap)",),
        ("host: calls itself", "host: framework rule"),
        "torch",
    ),
    _bug(
        "forward mode of a kernel's maps under vmap",
        ("vmap(second order fr)",),
        ("host: saves the output",),
        "torch",
    ),
    _bug(
        "a tensor of a vmap that has ended, where a kernel is called in a kernel's maps",
        ("jvp(vmap)", "vmap(second order rr)"),
        _DOUBLE_BACKWARD_ONLY,
        "torch",
    ),
    _bug(
        "two derivatives of a kernel inside torch.vmap",
        ("vmap(second order rr)",),
        _KERNEL_RULES,
        "torch",
    ),
    _bug(
        "two derivatives of a kernel inside torch.vmap",
        ("func.hessian and jacrev twice",),
        ("host: calls itself", "host: saves the output"),
        "torch",
    ),
    _bug(
        "PyTorch's own batching of gradients has no rule for a kernel",
        ("autograd.grad, is_grads_batched", "gradcheck"),
        (*_DOUBLE_BACKWARD_ONLY, *_KERNEL_RULES),
        "torch",
    ),
    _bug(
        "PyTorch's own batching of gradients has no rule for a kernel",
        ("gradgradcheck",),
        (*_DOUBLE_BACKWARD_ONLY, "host: calls itself", "host: saves the output"),
        "torch",
    ),
    _bug(
        "a traced graph does not keep the host function that it calls",
        ("func.linearize",),
        (*_CALLED_BACK, "host: framework rule", "host: inside a custom_rule"),
        "torch",
    ),
    _bug("a captured tensor is no fake tensor", ("*compiled*",), ("closes *",), "torch"),
    _bug(
        "the check for missing rules runs at a level of functorch that has ended",
        ("compiled second order fr",),
        ("host: calls itself", "host: saves the output"),
        "torch",
    ),
    _bug(
        "compiled, the derivative of a derivative without a rule is zero and not refused",
        ("compiled second order *", "shard_map*order 2", "lowering *order 2"),
        ("host: no rule",),
        "jax",
    ),
    _bug(
        "compiled, that a kernel has no rule is seen too late for the Hessian's symmetry",
        ("compiled second order fr", "second order fr of a loop", "shard_map*order 2"),
        _DOUBLE_BACKWARD_ONLY,
        "jax",
    ),
    _bug(
        "a tangent that does not vary over the mesh beside a primal that does",
        ("shard_map, check_vma=True, order 1",),
        (
            "defvjp",
            "saves the output",
            "saves an intermediate",
            "saves a tree",
            "static *",
            "integer beside, defvjp",
            "pytrees, defvjp",
            "matrix, defvjp",
            "closes *",
            "None *",
            *_DOUBLE_BACKWARD_ONLY,
            *_KERNEL_RULES,
            "host: inside a custom_rule",
        ),
        "jax",
    ),
    _bug(
        "a tangent that does not vary over the mesh beside a primal that does",
        ("shard_map, check_vma=True, order 2",),
        (
            "saves the output",
            "pytrees, defjvp",
            "matrix, defjvp",
            "host: calls itself",
            "host: saves the output",
        ),
        "jax",
    ),
)

REFUSALS: tuple[Refusal, ...] = (
    _NO_COMPILED_DOUBLE_BACKWARD,
    Refusal(
        "forward over forward needs a third kernel",
        "MissingRuleError",
        "has no rule, so its derivative is unknown",
        ("* second order ff", "check_grads, order 2"),
        _DOUBLE_BACKWARD_ONLY,
    ),
    Refusal(
        "JAX cannot save a complex array by a checkpoint's policy",
        "TypeError",
        "reduce_precision does not accept dtype complex128",
        ("checkpoint with a policy",),
        ("holomorphic, defvjp", "non-holomorphic, defvjp"),
        backend="jax",
    ),
    Refusal(
        "JAX cannot export what calls back into Python",
        "NotImplementedError",
        "host_callbacks",
        ("export of the value",),
        ("host:*",),
        backend="jax",
    ),
    Refusal(
        "JAX cannot export what calls back into Python",
        "NotImplementedError",
        "host_callbacks",
        ("export of the gradient",),
        _CALLED_BACK,
        backend="jax",
    ),
    Refusal(
        "JAX cannot lower a callback for several platforms at once",
        "NotImplementedError",
        "multi-platform lowering for python_callback",
        ("lowering *order 0",),
        ("host:*",),
        backend="jax",
    ),
    Refusal(
        "JAX cannot lower a callback for several platforms at once",
        "NotImplementedError",
        "multi-platform lowering for python_callback",
        ("lowering *order [12]",),
        _CALLED_BACK,
        backend="jax",
    ),
)


def transforms(backend: str) -> tuple[Transform, ...]:
    """Those that the backend has."""
    if backend == "torch":
        from support_transforms_torch import TORCH

        return (*BOTH, *TORCH)
    from support_transforms_jax import JAX

    return (*BOTH, *JAX)


def cells(backend: str) -> Iterator[tuple[Transform, Way]]:
    """All of a backend's, without those that ask for a function of two arguments of one."""
    for transform in transforms(backend):
        for way in WAYS.values():
            if way.halves is not None or not transform.halves:
                yield transform, way


def refusal_of(backend: str, transform: Transform, way: Way) -> Refusal | None:
    """Why a cell does not work; None where it does."""
    cell = (backend, transform, way)
    return next((bug for bug in BUGS if bug.holds(*cell)), None) or wanted_of(*cell)


def wanted_of(backend: str, transform: Transform, way: Way) -> Refusal | None:
    """What the cell should raise, were there no bugs; None where it should work."""
    if way.order < transform.order:
        return _BEYOND
    return next((r for r in REFUSALS if r.holds(backend, transform, way)), None)


# --- the table ---------------------------------------------------------------------------

_HEAD = """\
# What own rules can do

This page is written by `python tests/support_matrix.py`, and every number in it by a test: a cell
is a way of giving a rule in a transform, run and compared with a closed form. "9" means all nine
work, in both backends; "7/9" that seven do, and the notes below say what the others raise.
"""


def table() -> str:
    """The docs' page."""
    groups = list(dict.fromkeys(t.group for b in ("torch", "jax") for t in transforms(b)))
    notes: dict[str, list[str]] = {}
    lines = [
        "| Rule | " + " | ".join(groups) + " |",
        "|---" * (len(groups) + 1) + "|",
    ]
    for way in WAYS.values():
        row = [_cell(way, group, notes) for group in groups]
        lines.append(f"| {way.name} | " + " | ".join(row) + " |")
    lines += ["", "What does not work, and what it raises:", ""]
    lines += [f"- {reason}. {_listed(places)}" for reason, places in notes.items()]
    lines += ["", "The transforms of each column:", ""]
    for group in groups:
        names = {t.name: None for b in ("torch", "jax") for t in transforms(b) if t.group == group}
        lines.append(f"- **{group}**: {', '.join(names)}.")
    return _HEAD + "\n" + "\n".join(lines) + "\n"


def _listed(places: Sequence[str]) -> str:
    return "Cells: " + "; ".join(dict.fromkeys(places)) + "."


def _cell(way: Way, group: str, notes: dict[str, list[str]]) -> str:
    done = total = 0
    for backend in ("torch", "jax"):
        for transform, other in cells(backend):
            if other is not way or transform.group != group:
                continue
            total += 1
            refusal = refusal_of(backend, transform, way)
            if refusal is None:
                done += 1
                continue
            reason = f"to be mended: {refusal.reason}"
            if not refusal.bug:
                reason = f"{refusal.reason} (`{refusal.error}`)"
            name = {"torch": "PyTorch", "jax": "JAX"}[backend]
            notes.setdefault(reason, []).append(f"{name}, {transform.name}")
    return f"{total}" if done == total else f"{done}/{total}"


if __name__ == "__main__":
    assert all(importlib.util.find_spec(name) for name in ("torch", "jax"))
    TABLE.write_text(table())
