"""Records each torch.autograd.Function as a custom rule: its forward and its backward program.

What a `torch.autograd.Function` computes is written down as it runs. Autograd is then asked at
once for its cotangents: what its backward computes is a program of the cotangents, and of values
that it kept, the residuals::

    y, residuals = forward(x)        x_bar = backward(residuals, y_bar)

Functions that are called by a backward pass keep their rules as well, for double backward. What
leaves PyTorch on the way, such as a kernel in NumPy, has no translation and is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradtools.errors import is_of
from gradtools.rules import Rule
from gradtools.seeing.graphs.nodes import Body
from gradtools.seeing.torch.recording.autograd_functions import name_and_mark
from gradtools.seeing.torch.translating.recorder import Computing, FormulaRecorder
from gradtools.seeing.torch.translating.writer import Ref, like
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in

Tensor = torch.Tensor


def write_rule(recorder: FormulaRecorder, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function with a rule, and writes both down."""
    return _Applied(recorder, kind, args).run(apply, kwargs)


class _Applied:
    """One call of a function with a rule of its own."""

    def __init__(self, recorder: FormulaRecorder, kind: Any, args: Sequence[Any]) -> None:
        self.recorder, self.writer = recorder, recorder.writer
        self.kind, self.args = kind, args
        self.name = name_and_mark(kind, args)[0]
        self.xs = [x for x in tensors_in(list(args)) if is_inexact(x)]
        self.given = [recorder.of(x) for x in self.xs]

    def run(self, apply: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        before, calls = len(self.writer.values), recorder.crossed
        with recorder.within(self.name):
            out = apply(*self.args, **kwargs)
        outs = [y for y in tensors_in(out) if is_inexact(y)]
        tracked = [y for y in outs if y.requires_grad and y.grad_fn is not None]
        if not outs:
            return out
        refs = [recorder.of(y) for y in outs]
        if self._left(refs, before):
            self._mark(apply, kwargs, outs)
        elif tracked and not (self._crosses() and recorder.crossed > calls):
            self._rule(outs, refs)
        elif not tracked and any(x.requires_grad for x in self.xs):
            self._stop(outs, refs)
        return out

    def _crosses(self) -> bool:
        """Whether it calls another framework's function, whose derivative is that of its body."""
        rule = getattr(self.args[0], "rule", None) if self.args else None
        return isinstance(rule, Rule) and callable(rule.reaches)

    def _stop(self, outs: Sequence[Tensor], refs: Sequence[Ref]) -> None:
        for y, ref in zip(outs, refs, strict=True):
            self.recorder.hold(y, self.writer("stop", ref, shape=ref.shape, dtype=ref.dtype))

    # --- the rule

    def _rule(self, outs: Sequence[Tensor], refs: Sequence[Ref]) -> None:
        """A node that has the outputs' values, and the rule's cotangents."""
        try:
            self._differentiated(outs, refs, again=True)
        except RuntimeError as error:
            if not is_of("torch", error):
                raise
            self._differentiated(outs, refs, again=False)  # a backward that has no derivative

    def _differentiated(self, outs: Sequence[Tensor], refs: Sequence[Ref], again: bool) -> None:
        w, recorder = self.writer, self.recorder
        caller = [x for x in self.xs if x.requires_grad]
        to = [y for y in outs if y.requires_grad]
        first = len(w.values)
        with recorder.table.apart(), w.frame() as nodes, torch.enable_grad():
            cts = [torch.ones_like(y, requires_grad=True) for y in to]
            given = [recorder.introduced(ct, "") for ct in cts]
            with recorder.within(recorder.rules[-1][0] if recorder.rules else ""):
                result = torch.autograd.grad(
                    to, caller, cts, create_graph=again, retain_graph=True, allow_unused=True
                )
            place = {id(x): g for x, g in zip(caller, result, strict=True)}
            pairs = zip(self.xs, self.given, strict=True)
            results = [self._cotangent(place.get(id(x)), r) for x, r in pairs]
        residuals = self._residuals(nodes, results, first)
        made = self._node(outs, refs, to, given, nodes, results, residuals)
        for y, ref in zip(outs, made, strict=True):
            recorder.hold(y, ref, alone=True)

    def _cotangent(self, g: Tensor | None, x: Ref) -> Ref:
        return self.writer.constant(np.zeros(x.shape)) if g is None else self.recorder.of(g)

    def _residuals(self, nodes: Sequence[Any], results: Sequence[Ref], first: int) -> list[Ref]:
        """What the rule reads and does not make."""
        made = {v for node in self.writer.frames[0] for v in node.outputs if v >= first}
        inside = {v for node in nodes for v in node.outputs}
        read = [v for node in nodes for v in node.inputs] + [r.number for r in results]
        outer = [v for v in dict.fromkeys(read) if v not in inside and (v < first or v in made)]
        outer += [v for v in dict.fromkeys(read) if v in self.recorder.captured and v not in outer]
        values = self.writer.values
        return [Ref(v, values[v].shape, values[v].dtype) for v in outer]

    def _node(
        self,
        outs: Sequence[Tensor],
        refs: Sequence[Ref],
        to: Sequence[Tensor],
        given: Sequence[Ref],
        nodes: Sequence[Any],
        results: Sequence[Ref],
        residuals: Sequence[Ref],
    ) -> list[Ref]:
        """The rule of operands (outputs, residuals, x), which are computed before it."""
        w = self.writer
        operands = [*refs, *residuals, *self.given]
        with w.frame() as none:
            entering = [w.value((x.shape, x.dtype)) for x in operands]
        count = len(refs) + len(residuals)
        forward = w.graph(none, entering, entering[:count])
        cts = iter(given)
        backward_cts = [
            next(cts) if any(y is t for t in to) else w.value((r.shape, r.dtype))
            for y, r in zip(outs, refs, strict=True)
        ]
        with w.frame() as more:
            nothing = [w.constant(np.zeros(x.shape)) for x in operands[:count]]
        backward = w.graph([*more, *nodes], [*residuals, *backward_cts], [*nothing, *results])
        bodies = [Body(forward, tuple(range(len(operands)))), Body(backward, ())]
        w.native = self.name
        said: dict[str, Any] = {"name_": self.name, "residuals": len(residuals)}
        return w.node("custom_rule", operands, [like(y) for y in outs], bodies, **said)

    # --- what leaves PyTorch

    def _left(self, refs: Sequence[Ref], before: int) -> bool:
        """Whether an output came from nowhere: it is a constant that nothing computed."""
        constants = {
            v
            for node in self.writer.frames[0]
            if node.operation == "constant"
            for v in node.outputs
            if v >= before
        }
        return bool(self.xs) and any(r.number in constants for r in refs)

    def _mark(self, apply: Any, kwargs: Any, outs: Sequence[Tensor]) -> None:
        """An operation of which the name is known, and how PyTorch computes it."""
        w = self.writer
        w.native = self.name
        computing = Computing(apply, self.args, kwargs)
        given = [self.recorder.of(x) for x in computing.xs]
        more: dict[str, Any] = {"function": computing.value, "adjoint": computing.adjoint}
        made = w.node("opaque", given, [like(y) for y in outs], **more)
        for y, ref in zip(outs, made, strict=True):
            self.recorder.hold(y, ref)
