"""Defines the support matrix of custom rules: rules, transforms and cells that raise errors.

A cell that this module does not list works and matches the closed form of its rule. A cell that
does not work is listed with the error that it raises. `tests/conformance/test_support_matrix.py`
runs the cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.conformance.support_transforms import BOTH, Transform
from tests.conformance.support_ways import WAYS, Way


@dataclass(frozen=True)
class Refusal:
    """Cells of the matrix that raise an error.

    Attributes:
        reason: The reason for the error, which the table prints.
        error: The name of the exception type.
        words: A regular expression that the message matches.
        transforms: Patterns that match the names of the transforms.
        ways: Patterns that match the names of the rules.
        backend: The backend that raises the error, or None if both backends raise it.
        bug: Whether the error is a bug: the cell should work or raise a different error.
    """

    reason: str
    error: str
    words: str
    transforms: tuple[str, ...]
    ways: tuple[str, ...] = ("*",)
    backend: str | None = None
    bug: bool = False

    def holds(self, backend: str, transform: Transform, way: Way) -> bool:
        """Return whether the cell of this backend, transform and rule raises the error."""
        return (
            self.backend in (None, backend)
            and any(fnmatchcase(transform.name, p) for p in self.transforms)
            and any(fnmatchcase(way.name, p) for p in self.ways)
        )


_BEYOND = Refusal(
    "the last kernel of the chain has no rule",
    "MissingRuleError or TorchRuntimeError or BackendCompilerFailed",
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
_CALLED_BACK = ("host: d*", "host: calls itself", "host: saves the output")


BUGS: tuple[Refusal, ...] = (
    Refusal(
        "the transpose of a forward rule lacks a cast to the mesh axes of its cotangents",
        "GradtoolsError",
        "requires varying manual axes to match",
        ("shard_map, check_vma=True, order 2",),
        ("pytrees, defjvp",),
        backend="jax",
        bug=True,
    ),
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "these rules break the graph, which fullgraph=True forbids",
        "Unsupported",
        r"torch\.compiler\.disable",
        ("*compiled*",),
        ("retained_gradients", "implicit_solution"),
        backend="torch",
    ),
    Refusal(
        "gradcheck uses autograd's vmap, which does not support nested derivatives",
        "GradcheckError",
        "Batching rule not implemented for aten::_unpack_dual|does not support, or branches",
        ("gradcheck",),
        ("retained_gradients", "implicit_solution"),
        backend="torch",
    ),
    _NO_COMPILED_DOUBLE_BACKWARD,
    Refusal(
        "forward over forward needs a third kernel",
        "MissingRuleError",
        "has no rule, so its derivative is unknown",
        ("* second order ff", "check_grads, order 2"),
        _DOUBLE_BACKWARD_ONLY,
    ),
    Refusal(
        "a JAX checkpoint policy cannot save a complex array",
        "TypeError",
        "reduce_precision does not accept dtype complex128",
        ("checkpoint with a policy",),
        ("holomorphic, *", "non-holomorphic, *"),
        backend="jax",
    ),
    Refusal(
        "JAX cannot export callbacks into Python",
        "NotImplementedError",
        "serialization of host_callbacks",
        ("export of the value",),
        ("host:*",),
        backend="jax",
    ),
    Refusal(
        "JAX cannot export callbacks into Python",
        "NotImplementedError",
        "serialization of host_callbacks",
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


# The names of one rule of each kind.
PLAIN_WAYS = (
    "defvjp",
    "defjvp",
    "saves an intermediate",
    "matrix, defvjp",
    "host: double backward",
)
# Slow transforms, which in JAX run only for the rules in PLAIN_WAYS. Faster transforms test the
# same derivatives for every rule.
THINNED = (
    "check_grads, order 3",
    "custom_root",
    "grad and jvp of a condition",
    "jax.hessian",
    "second order rr of a loop",
)


def left_out(backend: str, transform: Transform, way: Way) -> bool:
    """Return whether the cell is skipped because it is slow."""
    return backend == "jax" and transform.name in THINNED and way.name not in PLAIN_WAYS


def transforms(backend: str) -> tuple[Transform, ...]:
    """Return all transforms of the support matrix for a backend."""
    if backend == "torch":
        from tests.conformance.support_transforms_torch import TORCH

        return (*BOTH, *TORCH)
    from tests.conformance.support_transforms_jax import JAX

    return (*BOTH, *JAX)


def cells(backend: str) -> Iterator[tuple[Transform, Way]]:
    """Yield all cells of a backend, except for skipped cells."""
    for transform, way in all_cells(backend):
        if not left_out(backend, transform, way):
            yield transform, way


def all_cells(backend: str) -> Iterator[tuple[Transform, Way]]:
    """Yield all cells of a backend; a transform of two arguments needs a rule with `halves`."""
    for transform in transforms(backend):
        for way in WAYS.values():
            if way.halves is not None or not transform.halves:
                yield transform, way


def refusal_of(backend: str, transform: Transform, way: Way) -> Refusal | None:
    """Return the `Refusal` that contains a cell, or None if the cell works."""
    cell = (backend, transform, way)
    return next((bug for bug in BUGS if bug.holds(*cell)), None) or wanted_of(*cell)


def wanted_of(backend: str, transform: Transform, way: Way) -> Refusal | None:
    """Return the `Refusal` that contains a cell, or None. Known bugs are ignored."""
    if way.order < transform.order:
        return _BEYOND
    return next((r for r in REFUSALS if r.holds(backend, transform, way)), None)
