"""Finds where data that left PyTorch for NumPy or Python returns, by perturbation.

The run is repeated with other numbers at the line where the data left. Numbers and arrays that then
reach PyTorch with other contents come from that line; so do outputs that change.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from gradtools.seeing.graphs.derivative_flow import backward, forward
from gradtools.seeing.graphs.nodes import Dependence, PlainGraph
from gradtools.seeing.graphs.recording import Run
from gradtools.seeing.torch.recording.calls import CallRecorder, Leaving
from gradtools.seeing.torch.recording.observation import ObservedRun, observed

Tensor = torch.Tensor
_NONE, _FULL = Dependence.NONE, Dependence.DIFFERENTIABLE
_MOST = 8  # lines that are tried, with up to three runs each


def follow(run: Run, seen: ObservedRun, outputs: list[int], before: list[Any]) -> None:
    """Adds links from data that left to where it returned."""
    recorder = seen.recorder
    trainable = [number for number, x in recorder.captured.items() if x.requires_grad]
    lost = _untraced(seen.graph(outputs), recorder.leavings, trainable)
    if not lost:
        return
    again = _PerturbedRuns(run, seen, before)
    control = again.with_others(frozenset())
    if control is None or control.any():  # f is not deterministic: assume that data returns
        return _note_unknown(recorder, lost, outputs)
    lines: dict[Any, list[int]] = {}
    for k in lost:
        lines.setdefault(recorder.leavings[k].source or k, []).append(k)
    if len(lines) > 1:
        together = again.with_others(frozenset(lost))
        if together is not None and not together.any():
            return
    for which in [*lines.values()][:_MOST]:
        moved = again.with_others(frozenset(which))
        if moved is None:  # f refuses other numbers, so it does look at these
            _note_unknown(recorder, which, outputs)
        else:
            back = moved.nodes or moved.captured
            ends = [k for k in moved.outputs if not (back and isinstance(seen.outs[k], Tensor))]
            for leaving in (recorder.leavings[k] for k in which):
                for node in moved.nodes:
                    recorder.enters(leaving, node)
                returned = *moved.captured, *(outputs[k] for k in ends)
                recorder.outside += [(leaving.value, number) for number in returned]


def _note_unknown(recorder: CallRecorder, which: Sequence[int], outputs: Sequence[int]) -> None:
    """Assumes that all outputs may depend on the data, so that no argument counts as unused."""
    values = [recorder.leavings[k].value for k in which]
    recorder.outside += [(value, out) for value in values for out in outputs]


def _untraced(graph: PlainGraph, leavings: Sequence[Leaving], held: Sequence[int]) -> list[int]:
    """The leavings whose data could explain a lost gradient, and was not seen to come back.

    held: What f holds that requires grad.
    """
    if not leavings:
        return []
    back = {source for source, _ in graph.outside}
    matters = backward(graph, dict.fromkeys(graph.outputs, _FULL))
    result: set[int] = set()
    for value in (*graph.inputs, *(n for n in held if matters.get(n, _NONE) < _FULL)):
        if not graph.values[value].is_inexact:
            continue
        reached = forward(graph, {value: _FULL})
        ends = any(reached.get(out, _NONE) for out in graph.outputs)
        for k, leaving in enumerate(leavings):
            strength = reached.get(leaving.read, _NONE)
            explains = strength > _NONE and not (leaving.branch and ends)
            if leaving.value not in back and explains:
                result.add(k)
    return sorted(result)


@dataclass(frozen=True)
class Moved:
    """What is another in a run with other numbers in some place.

    Attributes:
        outputs: Which outputs.
        nodes: The nodes that were given other numbers or arrays from outside.
        captured: The tensors, by number, that were made of them where nobody looked.
    """

    outputs: list[int]
    nodes: list[int]
    captured: list[int]

    def any(self) -> bool:
        """Whether anything is."""
        return bool(self.outputs or self.nodes or self.captured)


@dataclass
class _PerturbedRuns:
    """Runs with other numbers in some places, compared with the first run."""

    run: Run
    first: ObservedRun
    before: list[Any]

    def with_others(self, which: frozenset[int]) -> Moved | None:
        """What moved; None if f does not run with any such numbers."""
        moved = None
        # f may refuse large steps, and take smaller ones; what it clips may move one way only
        for size in (1.0, -1.0, 1e-3):
            if moved is not None and (moved.any() or not which or abs(size) < 1):
                break
            replace = (which, partial(_other, size=size))
            again = observed(self.run, self.first.leaves, self.first.names, replace)
            with contextlib.ExitStack() as inside:
                inside.enter_context(contextlib.redirect_stdout(io.StringIO()))  # printed already
                try:
                    seen = inside.enter_context(again)
                except Exception:  # the user's code, at numbers that the user did not pass
                    continue
                if seen.refusal is None:
                    moved = self._moved(seen)
        return moved

    def _moved(self, seen: ObservedRun) -> Moved:
        after = copies(seen.outs)
        alike = len(after) == len(self.before)
        outputs = [k for k, a in enumerate(self.before) if not (alike and _same(a, after[k]))]
        return Moved(
            outputs, _different_entries(self.first, seen), _different_captures(self.first, seen)
        )


def _different_entries(first: ObservedRun, later: ObservedRun) -> list[int]:
    """The nodes of the first run that were given something else in the later one."""
    result = []
    pairs = zip(first.recorder.nodes, later.recorder.nodes, strict=False)
    for k, (a, b) in enumerate(pairs):
        if a.native != b.native:
            break  # from here on the program took another branch
        if first.recorder.entries.get(k) != later.recorder.entries.get(k):
            result.append(k)
    return result


def _different_captures(first: ObservedRun, later: ObservedRun) -> list[int]:
    """The tensors that came from nowhere and are others in the later run."""
    a, b = ([*seen.recorder.captured.items()] for seen in (first, later))
    if len(a) != len(b):
        return []
    known = first.recorder.reachable
    pairs = zip(a, b, strict=True)
    return [n for (n, x), (_, y) in pairs if id(x) not in known and not _same(x, y)]


def _other(x: Any, size: float, rng: np.random.Generator | None = None) -> Any:
    """A perturbed number, array or list of the same type."""
    rng = rng or np.random.default_rng(0)
    if isinstance(x, list):
        return [_other(item, size, rng) for item in x]
    if isinstance(x, bool | np.bool_):
        return not x
    if isinstance(x, np.ndarray) and x.dtype.kind == "b":
        return ~x
    array = np.asarray(x)
    if array.dtype.kind not in "fc":
        return x + 1
    step = size * (1 + np.abs(array)) * (1 + rng.random(array.shape)) * rng.choice([-1.0, 1.0])
    other = (array + step).astype(array.dtype)
    return other if isinstance(x, np.ndarray) else type(x)(other.item())


def copies(outs: Sequence[Any]) -> list[Any]:
    """Copies of the outputs, for a later comparison."""
    return [x.detach().clone() if isinstance(x, Tensor) else np.array(x) for x in outs]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) != isinstance(b, Tensor) or a.shape != b.shape:
        return False
    if isinstance(a, Tensor):
        return bool(((a == b) | (a != a) & (b != b)).all())
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
