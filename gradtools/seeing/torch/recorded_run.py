"""`record` in PyTorch: one run of a function as a graph, and where it loses a gradient.

The user's function runs once under the recorders of `recording/`, and its effects are undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradtools.backend import Fun
from gradtools.seeing.graphs.lost_terms import losses
from gradtools.seeing.graphs.recording import Recording, Run
from gradtools.seeing.torch.recording.autograd_functions import looked_up
from gradtools.seeing.torch.recording.numpy_round_trips import copies, follow
from gradtools.seeing.torch.recording.observation import observed, watchable
from gradtools.torch.rerunning import Rerunnable, rerun

Tensor = torch.Tensor
_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)
__all__ = ["is_model", "record", "repeatable", "rerun", "watchable", "where_lost"]


def record(run: Run, leaves: Sequence[Any], names: Sequence[str]) -> Recording:
    """Records one run as a graph and undoes its effects."""
    with observed(run, leaves, names) as seen:
        if seen.refusal is not None:
            return Recording(seen.graph([]), seen.refusal)
        outputs = [seen.output(y) for y in seen.outs]
        hosts = tuple([k for k, y in enumerate(seen.outs) if isinstance(y, _NUMBERS)])
        before = copies(seen.outs)
    follow(run, seen, outputs, before)
    return Recording(
        seen.graph(outputs),
        host_outputs=hosts,
        stand_ins=seen.stand_ins(),
        wanted=tuple(
            [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        ),
        parameters=seen.parameters(),
        held=seen.held(),
        reads=seen.reads(),
    )


def where_lost(fun: Fun, leaves: Sequence[Any], index: int) -> list[str]:
    """The places at which the path from a leaf to the outputs is cut, for error messages.

    Runs f again, when an error is raised in any case. Returns nothing if f cannot be recorded.
    """
    if not watchable():
        return []
    run: Any = Rerunnable(lambda xs: fun(*xs)[0], [None, getattr(fun, "f", fun)])
    try:
        result = record(run, leaves, [""] * len(leaves))
    except Exception:  # f does not run twice: the error is raised without places
        return []
    lost = [loss.node for loss in losses(result.graph, result.graph.inputs[index])]
    places = [f"{node.native} at {node.source}" if node.source else node.native for node in lost]
    stand_in = result.stand_ins[index] if result.stand_ins else ""
    if not places and stand_in:
        places.append(f"reading {stand_in} in its place, which is the same tensor")
    return list(dict.fromkeys(places))


def repeatable(caller: str, f: Any) -> Any:
    """f, whose effects are undone by a run; a bound `Function.apply` is looked up at each call."""
    return looked_up(f)


def is_model(x: Any) -> bool:
    """Whether x is a module."""
    return isinstance(x, torch.nn.Module)
