"""A rule that is applied to the very tangents whose map is being transposed.

The forward rule of a linear function may use the function itself, df(x)[t] = f(t). Its transpose
asks for the derivative of t -> f(t), which by the rule is df(t)[s] = f(s), and so on without end.
What is linear is its own derivative: there the function's own code is transposed, as JAX does,
where a `custom_jvp` that meets a transposition is evaluated as plain code.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule

Tensor = torch.Tensor
_STATE = threading.local()


@dataclass(eq=False)
class _Transposition:
    """A transposition that is under way, and functorch's level of its vectors while it traces."""

    source: Rule
    level: int | None = None
    by_code: bool = False  # whether the rule's own code is transposed

    @contextmanager
    def traced(self) -> Iterator[None]:
        """While the map is traced, on the innermost level of torch.func."""
        before, self.level = self.level, torch._C._functorch.peek_interpreter_stack().level()
        try:
            yield
        finally:
            self.level = before


def _running() -> list[_Transposition]:
    found: list[_Transposition] = _STATE.__dict__.setdefault("running", [])
    return found


@contextmanager
def transposing(rule: Rule) -> Iterator[_Transposition]:
    """While one of the rule's maps is transposed."""
    running = _running()
    running.append(own := _Transposition(rule.source or rule))
    try:
        yield own
    except GradtoolsError as error:
        if not own.by_code:
            raise
        raise GradtoolsError(
            f"rule {rule.name!r}: its forward rule applies {rule.name} itself to tangents, so "
            f"reverse mode transposes the code of {rule.name}, which failed: {error} Give it a "
            "reverse rule as well, with defvjp(fwd, bwd)."
        ) from error
    finally:
        running.pop()


def in_own_transpose(rule: Rule, xs: Sequence[Tensor]) -> bool:
    """Whether the rule is applied to vectors through which its own map is being transposed.

    Its own, or that of a rule that its map applied in turn. A rule with a cotangent map needs no
    transposition there.
    """
    running = _running()
    if not running or rule.cotangent is not None or rule.linearize is not None:
        return False
    sources = [t.source for t in running]
    source = rule.source or rule
    if source not in sources:
        return False
    first = sources.index(source)
    levels = {t.level for t in running[first:]}
    if not any(_is_tracked_at(levels, x) for x in xs):
        return False
    running[first].by_code = True
    return True


def _is_tracked_at(levels: set[int | None], x: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and functorch.maybe_get_level(x) in levels:
            return True
        x = functorch.get_unwrapped(x)
    return False
