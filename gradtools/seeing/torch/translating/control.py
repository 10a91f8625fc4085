"""PyTorch's own control flow, followed as Python would run it.

``torch.cond`` runs the branch that is taken, ``while_loop`` its rounds, ``scan`` its slices, one
after the other. They are compiled otherwise, and what they compute could not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.torch.patches import control_flow_called

Tensor = torch.Tensor


def _while_loop(goes_on: Any, body: Any, carried: Any, more: Any = ()) -> Any:
    while goes_on(*carried, *more):
        carried = tuple(body(*carried, *more))
    return carried


def _scan(combine: Any, carried: Sequence[Any], xs: Sequence[Any], more: Any = ()) -> Any:
    """The last carries, and what each round gives, stacked."""
    rounds: list[Any] = []
    for k in range(xs[0].shape[0]):
        result = list(combine(*carried, *(x[k] for x in xs), *more))
        carried = result[: len(carried)]
        rounds.append(result[len(carried) :])
    return [*carried, *(torch.stack(column) for column in zip(*rounds, strict=True))]


_FOLLOWED: dict[str, Callable[..., Any]] = {
    "cond": lambda chosen, yes, no, operands=(): (yes if chosen else no)(*operands),
    "while_loop": _while_loop,
    "scan": _scan,
}
_REFUSED = ("associative_scan", "map_impl", "flex_attention", "switch")


def followed() -> AbstractContextManager[None]:
    """Inside, this thread's control flow runs in Python."""
    return control_flow_called(_follow)


def _follow(operator: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    name = operator.name()
    if name in _REFUSED:
        raise GradtoolsError(f"formula: PyTorch's {name} has no translation; write it as a loop.")
    return _FOLLOWED.get(name, call)(*args, **kwargs)
