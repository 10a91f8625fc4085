"""Where gradients are lost, and where not: what the tables of both frameworks share.

    CASES = LostGradients(X)

    @CASES.cause()
    def f(x):
        return stop(x).sum()  # <- detached

A cause bears at each line at which the gradient of its first argument is lost what kind of loss it
is: `# <- detached`, or `# <- detached, partly` where only one term is lost. A healthy function has
no such comment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.support.scenarios import Scenario, Table


class Loss(NamedTuple):
    """A kind of loss, its line, and whether all of the gradient is lost."""

    kind: str
    line: int | None
    whole: bool


class LostGradients:
    """The causes and the healthy functions of one framework, each with its arguments.

    Attributes:
        x: The argument of those that name none.
        causes: Functions that lose a gradient.
        healthy_ones: Functions that lose none.
    """

    def __init__(self, x: Any) -> None:
        self.x = x
        self.causes, self.healthy_ones = Table(), Table()

    def cause(self, *args: Any, name: str = "", scope: Any = None, written: Any = None) -> Any:
        """Adds a cause. scope: The modules in which; written: What bears the comments for it."""
        return self.causes.add(name, args=args or (self.x,), scope=scope, written=written)

    def healthy(self, *args: Any, name: str = "") -> Any:
        """Adds a healthy function."""
        return self.healthy_ones.add(name, args=args or (self.x,))

    def in_one_line(self, functions: dict[str, dict[str, Callable[..., Any]]]) -> None:
        """Adds causes of one line each, which bear no comment, by what it would say."""
        for mark, named in functions.items():
            for name, f in named.items():
                self.causes.add(name, args=(self.x,), mark=mark)(f)


def losses(cause: Scenario) -> list[Loss]:
    """Where a cause loses a gradient, by its comments."""
    f = cause.get("written") or cause.program
    if mark := cause.get("mark"):
        return _losses(mark, f.__code__.co_firstlineno)
    lines, first = inspect.getsourcelines(f)
    marks = [(line.partition("# <- ")[2].strip(), first + i) for i, line in enumerate(lines)]
    return [loss for mark, line in marks if mark for loss in _losses(mark, line)]


def _losses(mark: str, line: int) -> list[Loss]:
    kinds, _, partly = mark.partition(", ")
    return [Loss(kind, line, not partly) for kind in kinds.split(" and ")]


# --- in training -------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A training loop with a loss of gradients in it.

    Attributes:
        make: Makes the loop, which has `model`, `optimizer` and `closure`.
        found: The kinds that are to be found, by the name of the leaf.
        numerical: Whether it holds at these values alone.
        notes: The leaves that notes name.
        oracle: Whether plain steps can say what does not move.
        strangers: Whether the optimizer holds arrays of another model.
    """

    make: Callable[[], Any]
    found: dict[str, str]
    numerical: bool = False
    notes: tuple[str, ...] = ()
    oracle: bool = True
    strangers: bool = False

    def check(self, gt: Any, still: Callable[[Any, int], set[str]]) -> None:
        """Asserts that the loss is found and nothing else is; `still`: what plain steps leave."""
        loop = self.make()
        report = gt.why_zero(loop.closure, model=loop.model, optimizer=loop.optimizer)
        assert kinds_by_leaf(report) == self.found
        assert any(f.kind == "other_model" for f in report.findings) == self.strangers
        assert {n for _, names in report.notes for n in names} == set(self.notes)
        if self.oracle:
            assert still(self.make(), 1 if self.numerical else 3) == set(self.found)


def kinds_by_leaf(report: Any) -> dict[str, str]:
    """What is lost as a whole, without the other models' arrays in the optimizer."""
    whole = [f for f in report.findings if f.whole and f.kind != "other_model"]
    return {f.argument: f.kind for f in whole}
