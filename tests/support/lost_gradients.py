"""Defines programs that lose gradients and healthy programs for both frameworks.

    @CASES.cause()
    def f(x):
        return stop(x).sum()  # <- detached

A cause is a function that loses the gradient of its first argument. The lines that lose it have a
comment with the kind of loss: `# <- detached`, or `# <- detached, partly` if one term is lost. A
healthy function has no such comment. Functions of `gt` and x run in both frameworks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tests.support.scenarios import Scenario, Table


class Loss(NamedTuple):
    """The kind and source line of a lost gradient, and whether the whole gradient is lost."""

    kind: str
    line: int | None
    whole: bool


class LostGradients:
    """The functions of one framework that lose gradients, and its healthy functions.

    Attributes:
        x: The default argument of a function.
        causes: Functions that lose a gradient.
        healthy_ones: Functions that lose no gradient.
    """

    def __init__(self, gt: Any, x: Any) -> None:
        self.x = x
        self.causes, self.healthy_ones = Table(), Table()
        of_both = lambda f: partial(f, gt)
        self.in_one_line({m: {n: of_both(f) for n, f in fs.items()} for m, fs in SHARED.items()})
        for f in SHARED_CAUSES:
            self.cause(name=f.__name__, written=f)(partial(f, gt))
        for name, f in SHARED_HEALTHY.items():
            self.healthy(name=name)(partial(f, gt))

    def cause(self, *args: Any, name: str = "", scope: Any = None, written: Any = None) -> Any:
        """Register a cause.

        scope: Expected modules; written: The function whose source contains the comments.
        """
        return self.causes.add(name, args=args or (self.x,), scope=scope, written=written)

    def healthy(self, *args: Any, name: str = "") -> Any:
        """Register a healthy function."""
        return self.healthy_ones.add(name, args=args or (self.x,))

    def in_one_line(self, functions: dict[str, dict[str, Callable[..., Any]]]) -> None:
        """Register one-line functions without comments, grouped by the kind of gradient loss."""
        for mark, named in functions.items():
            for name, f in named.items():
                self.causes.add(name, args=(self.x,), mark=mark)(f)


def losses(cause: Scenario) -> list[Loss]:
    """Return the expected `Loss` records, which the comments in the source of a cause define."""
    f = cause.get("written") or cause.program
    if mark := cause.get("mark"):
        return _losses(mark, getattr(f, "func", f).__code__.co_firstlineno)
    lines, first = inspect.getsourcelines(f)
    marks = [(line.partition("# <- ")[2].strip(), first + i) for i, line in enumerate(lines)]
    return [loss for mark, line in marks if mark for loss in _losses(mark, line)]


def _losses(mark: str, line: int) -> list[Loss]:
    kinds, _, partly = mark.partition(", ")
    return [Loss(kind, line, not partly) for kind in kinds.split(" and ")]


# --- in both frameworks ------------------------------------------------------------------

THREE = np.float32([1.0, 2.0, 3.0])
floats = lambda gt, x: gt.xp.astype(x, gt.xp.float32)

SHARED: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "detached": {
        "stopped": lambda gt, x: (gt.stop_gradient(x) ** 2).sum(),
        "stopped in compiled code": lambda gt, x: gt.compile(gt.stop_gradient)(x * 2).sum(),
        "stopped in a checkpoint": lambda gt, x: gt.checkpoint(gt.stop_gradient)(x + 1).sum(),
        "stopped in vmap": lambda gt, x: gt.vmap(lambda y: gt.stop_gradient(y) + 1)(x).sum(),
        "stopped in chunks": lambda gt, x: gt.chunked(lambda y: gt.stop_gradient(y), 2)(x).sum(),
    },
    "left_framework": {"a number": lambda gt, x: float(x[0]) * 2.0},
    "integer_cast": {
        "cast to an integer": lambda gt, x: floats(gt, gt.xp.astype(9 * x, gt.xp.int32)).sum(),
    },
    "unused": {
        "not read": lambda gt, x: (gt.asarray(THREE) ** 2).sum(),
        "read for its shape": lambda gt, x: (gt.xp.zeros_like(x) + 1).sum(),
    },
    "discrete": {
        "a comparison": lambda gt, x: floats(gt, x > 0.1).sum(),
        "order by argsort": lambda gt, x: gt.asarray(THREE)[gt.xp.argsort(x)][0],
        "one-hot of argmax": lambda gt, x: floats(gt, gt.xp.argmax(x) == gt.asarray(THREE)).sum(),
        "chosen by comparison": lambda gt, x: gt.xp.where(x > 0, gt.asarray(THREE), -1.0).sum(),
    },
    "discrete, partly": {"a count": lambda gt, x: (x**2).sum() + floats(gt, x > 0).sum()},
    "zero_derivative": {
        "rounded": lambda gt, x: gt.xp.round(10 * x).sum() / 10,
        "floored": lambda gt, x: gt.xp.floor(4 * x).sum(),
    },
    "zero_derivative, partly": {
        "a rounded term": lambda gt, x: (x**2).sum() + gt.xp.round(3 * x).sum()
    },
    "zero": {
        "times zero": lambda gt, x: (gt.xp.sin(x) * 0.0).sum(),
        "scaled to zero": lambda gt, x: gt.scale_gradient(x, 0.0).sum(),
        "clipped": lambda gt, x: gt.xp.clip(x + 4, 0.0, 1.0).sum(),
        "a dead relu": lambda gt, x: gt.xp.maximum(x - 10, 0 * gt.stop_gradient(x)).sum(),
        "a saturated sigmoid": lambda gt, x: (1 / (1 + gt.xp.exp(-x - 900))).sum(),
        "subtracted from itself": lambda gt, x: (x - x).sum(),
    },
}


def stopped_and_used(gt, x):
    y = gt.xp.sin(x)
    y = gt.stop_gradient(y)  # <- detached
    return (y * 2).sum()


def stopped_under_a_python_if(gt, x):
    if x.sum() > 0:
        x = gt.stop_gradient(x)  # <- detached
    return x.sum()


def stopped_within_a_gradient(gt, x):
    inner = lambda y: (gt.stop_gradient(x) * y).sum()  # <- detached
    return gt.grad(inner)(gt.asarray(THREE)).sum()


def two_terms(gt, x):
    a = floats(gt, gt.xp.argmax(x))  # <- discrete, partly
    b = gt.xp.floor(x).sum()  # <- zero_derivative, partly
    return (x**2).sum() + a + b


def two_paths_that_cancel(gt, x):
    there = gt.xp.sin(x) * 2
    back = -there
    return (there + back).sum()  # <- zero


def underflow(gt, x):
    tiny = floats(gt, x) * 1e-30  # <- zero
    return (tiny * 1e-30).sum()


def a_rule_without_a_cotangent(gt, x):
    product = gt.custom_rule(lambda x, y: x * y)
    product.defvjp(lambda x, y: (product(x, y), x), lambda saved, ct: (None, ct * saved))
    return product(x, gt.xp.ones_like(x)).sum()  # <- rule


SHARED_CAUSES = [
    *(stopped_and_used, stopped_under_a_python_if, stopped_within_a_gradient, two_terms),
    *(two_paths_that_cancel, underflow, a_rule_without_a_cotangent),
]


def host_kernel(gt, x):
    kernel = gt.host_function(np.sin)
    kernel.defvjp(lambda z: (kernel(z), z), lambda z, ct: (ct * gt.xp.cos(z),))
    return kernel(x).sum()


def branches_and_checks(gt, x):
    assert gt.xp.all(gt.xp.isfinite(x))
    return gt.xp.sum(x**2) if x.sum() > 0 else x.sum()


SHARED_HEALTHY: dict[str, Callable[[Any, Any], Any]] = {
    "a host kernel with a rule": host_kernel,
    "branches and checks of values": branches_and_checks,
    "edited gradients": lambda gt, x: (gt.clip_gradient(gt.reverse_gradient(x), 1.0) ** 2).sum(),
    "a known gradient": lambda gt, x: gt.replace_gradient(x, 0 * x + 1).sum(),
    "a Hessian product": lambda gt, x: gt.hvp(lambda y: (y**4).sum(), (x,), (x,))[1][0].sum(),
    "a Hessian": lambda gt, x: gt.hessian(lambda y: (y**3).sum())(x).sum(),
    "a stopped term": lambda gt, x: (x**3).sum() + (gt.stop_gradient(x) ** 2).sum(),
    "a stopped part": lambda gt, x: gt.xp.concat([gt.stop_gradient(x), x * 2]).sum(),
    "a rounded part": lambda gt, x: (x**2 + gt.xp.sin(gt.xp.round(x * 3))).sum(),
    "relu by a mask": lambda gt, x: (x * (x > 0)).sum(),
    "a selection": lambda gt, x: gt.xp.where(x > 0, gt.xp.exp(x), gt.xp.sin(x)).sum(),
    "a boolean index": lambda gt, x: x[x > 0].sum() + x.sum(),
    "an index from argmax": lambda gt, x: x[gt.xp.argmax(x)],
    "vmap in compiled code": lambda gt, x: gt.compile(gt.vmap(lambda y: y * y))(x).sum(),
    "a checkpoint": lambda gt, x: gt.checkpoint(lambda z: gt.xp.exp(gt.xp.sin(z)))(x).sum(),
}


# --- lost gradients in training ----------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A training loop with a planted bug, and the expected report of why_zero.

    Attributes:
        make: Returns a loop with the attributes `model`, `optimizer` and `closure`.
        found: The expected kind of finding for each leaf, by name.
        numerical: Whether the gradient is zero only because of the values in this program.
        notes: The names of the leaves in the notes of the report.
        oracle: Whether plain optimizer steps change all leaves except the leaves in `found`.
        strangers: Whether the optimizer has parameters of another model.
    """

    make: Callable[[], Any]
    found: dict[str, str]
    numerical: bool = False
    notes: tuple[str, ...] = ()
    oracle: bool = True
    strangers: bool = False

    def check(self, gt: Any, still: Callable[[Any, int], set[str]]) -> None:
        """Check the report of why_zero; `still` returns leaves that training does not change."""
        loop = self.make()
        report = gt.why_zero(loop.closure, model=loop.model, optimizer=loop.optimizer)
        assert kinds_by_leaf(report) == self.found
        assert any(f.kind == "other_model" for f in report.findings) == self.strangers
        assert {n for _, names in report.notes for n in names} == set(self.notes)
        if self.oracle:
            assert still(self.make(), 1 if self.numerical else 3) == set(self.found)


def kinds_by_leaf(report: Any) -> dict[str, str]:
    """Return the kind of finding for each leaf of the model whose whole gradient is lost."""
    whole = [f for f in report.findings if f.whole and f.kind != "other_model"]
    return {f.argument: f.kind for f in whole}
