"""Calls custom rules, and caches state for calls with the same shapes and dtypes.

A signature consists of the shapes, dtypes and devices of a call's tensors, and the structure and
constants of the arguments. `Calls` makes a `Signature` object for each signature, which contains
the rule, the author's functions of flat tensors, and state that later calls share.

If only autograd's graph or forward mode is active, this module runs the author's code, and attaches
an autograd node or tangents to the outputs. Otherwise `installing.py` applies the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations, product, starmap
from operator import attrgetter
from typing import Any

import torch

from gradtools.custom_structure import ARGUMENT_ERRORS, Specialization
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import remember, type_key
from gradtools.rules import ARRAY, closed_over_error
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.functorch_wrappers import PLAIN, filled, is_dual, is_wrapped, ones
from gradtools.torch.modes import unpacked
from gradtools.torch.operation_marks import running
from gradtools.torch.rules.checking import check_linear, closures_of
from gradtools.torch.rules.functions import Application, attach, without_aliases
from gradtools.torch.rules.installing import apply_rule
from gradtools.torch.rules.transposing import applied_to, in_eager, ongoing, pulled_back, tangent_at
from gradtools.torch.state import Randomness, restored
from gradtools.torch.trees import flatten

Tensor = torch.Tensor
_is_compiling, _levels = torch.compiler.is_dynamo_compiling, upstream.peek_interpreter_stack
_modes, _hooks = upstream.count_of_function_modes, upstream.saved_tensors_hooks_on
_forward_level, _graphs = upstream.forward_level, torch.is_grad_enabled
_STRIDED, _requires_grad = torch.strided, attrgetter("requires_grad")
_LEAF = flatten(torch.empty(0))[1]
_CONSTANTS = {bool, int, float, complex, str, bytes, type(None), torch.dtype, type(ARRAY)}


class Signature:
    """State that all calls with the same shapes, dtypes, devices and argument structure share.

    Attributes:
        specialized: The custom rule, specialized to this structure of arguments.
        rule: The `Rule` object of `specialized`.
        avals: The avals of the tensors: shape, dtype and device.
        likes: The entries of `avals`, with None in place of the avals of integer tensors.
        key: The shape and dtype of each tensor, a key for checks that run once.
        repeats: Whether the forward pass may run again, which requires the states of random
            generators.
        shared: Maps the positions of saved tensors to the `Application` that calls share.
        smooth: Whether all tensors are floating or complex and the rule's code can record a graph.
        records: Whether the method `recorded` may be used.
        recording: The `Application` that calls of the method `recorded` share.
    """

    def __init__(self, specialized: Specialization, avals: tuple[Any, ...]) -> None:
        self.specialized, self.rule, self.avals = specialized, specialized.rule, avals
        self.likes = [x if x[1].is_floating_point or x[1].is_complex else None for x in avals]
        self.key = tuple([(tuple(shape), dtype) for shape, dtype, _ in avals])
        self.closed, self.repeats = closures_of(self.rule), True
        self.smooth = None not in self.likes and not hasattr(specialized.of, "kernel")
        self.records = specialized.bwd is None and self.smooth
        self.shared: dict[Any, Application] = {}
        self.recording: Application | None = None

    def outputs(self, ys: Sequence[Tensor]) -> Any:
        """Rebuilds the output of f from its tensors `ys`."""
        out_def = self.specialized.outs.get(self.key, self.specialized.newest)
        return ys[0] if out_def is _LEAF else self.specialized.backend.unflatten(out_def, list(ys))

    def value(self, args: tuple[Any, ...], tracked: bool) -> Any:
        """Calls f directly, for arguments that are not differentiated."""
        out = self.specialized.fun(*args)
        is_known = type(out) is Tensor and self.key in self.specialized.values
        ys = [out] if is_known else self.specialized.outputs(args, out, "it")
        if not tracked and any(map(_requires_grad, ys)):
            raise closed_over_error(self.rule.name)
        return out if is_known else self.outputs(ys)

    # --- fwd and bwd

    def applied(self, args: tuple[Any, ...]) -> Any:
        """Runs fwd once, and returns the output with an autograd node."""
        point, outs = self.evaluated(tuple(map(Tensor.detach, args)))
        ys = attach((point, outs), *args)
        return ys[0] if point.pull is not pulled_back else self.outputs(ys[: point.count])

    def evaluated(self, xs: tuple[Any, ...]) -> tuple[Application, tuple[Tensor, ...]]:
        """Runs fwd once, and returns the `Application`, the outputs and the extras."""
        before = Randomness.now(xs) if self.repeats else None
        result = self.specialized.fwd(*xs)
        shared = self._shared(xs, result)
        if shared is not None:
            point, outs = shared
            if len(outs) == 1 or (before is not None and before.current() is before):
                self.repeats = len(outs) > 1
                return point, tuple(map(Tensor.detach, outs))
        at = self.specialized.linearized(xs, result)
        again = bool(at.extras or at.opaque_residuals)
        if again and before is None:  # a second evaluation must draw the same numbers
            self.repeats = True
            return self.evaluated(xs)
        self.repeats, point = again, Application(self.rule)
        outs = tuple(point.record(at, before))
        point.note(xs, outs)
        return point, outs

    def _shared(self, xs: tuple[Tensor, ...], result: Any) -> Any:
        """Returns a shared `Application`, and the output with the extras.

        Calls that save tensors at the same positions share the application. Returns None if
        `result` is not a pair of a floating-point tensor and a residual, or of a floating-point
        tensor and a tuple of residuals.
        """
        out, res = result if type(result) is tuple and len(result) == 2 else (None, None)
        leaves = (res,) if type(res) is Tensor else res
        if type(out) is not Tensor or type(leaves) is not tuple:
            return None
        if not out.dtype.is_floating_point or out.requires_grad:
            return None
        everything, places = [*xs, out], []
        for r in leaves:
            if type(r) is not Tensor or r.requires_grad:
                return None
            for i, x in enumerate(everything):  # noqa: B007
                if r is x:
                    break
            else:
                i = len(everything)
                everything.append(r)
            places.append(i)
        outs = everything[len(xs) :]
        point = self.shared.get(key := (type(res), *places))
        if point is None:
            point = self.shared[key] = Application(self.rule, materializes=len(outs) == 1)
            point.record(self.specialized.linearized(xs, result))
            point.note(xs, outs)
            self._share(point, None if type(res) is Tensor else len(places))
        return point, outs

    def _share(self, point: Application, count: int | None) -> None:
        """Sets the cotangent map and backward pass of a shared application; both call bwd directly.

        count: The number of residuals, or None if bwd is called with a tensor instead of a tuple.
        """
        specialized, avals, likes, maps = self.specialized, self.avals, self.likes, point.linearized
        bwd, is_flat = specialized.bwd, specialized.is_flat
        expected = [(*key, x is not None) for key, x in zip(self.key, likes, strict=True)]

        def cotangent(saved: Sequence[Any], cts: Sequence[Any]) -> Any:
            try:
                cotangents = bwd(saved[0] if count is None else tuple(saved[:count]), cts[0])
            except ARGUMENT_ERRORS as error:
                specialized.note_call("bwd", error)
                raise
            if is_flat and type(cotangents) is tuple and len(cotangents) == len(avals):
                for g, (shape, dtype, _) in zip(cotangents, avals, strict=True):
                    if type(g) is not Tensor or g.dtype is not dtype or g.shape != shape:
                        break
                else:
                    return cotangents
            return filled(specialized.cotangents(cotangents, expected), likes)

        def pull(ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
            first = type(cts[0]) is Tensor and (len(cts) == 1 or all(c is None for c in cts[1:]))
            if first and (not _graphs() or (_forward_level() < 0 and in_eager())):
                return cotangent(ctx.saved_tensors, cts)
            return pulled_back(ctx, cts)

        point.pull = pull
        if maps is not None and specialized.refined is None:
            point.linearized = replace(maps, cotangent=cotangent)

    # --- reverse mode of a rule that has only a forward map
    #
    # The tangent map T(x) of the rule is recorded in the graph of the call, and autograd transposes
    # it. T(x) dx is linear in dx, so the transpose does not depend on dx. The map is recorded with
    # x as dx, so the backward pass adds T(x)^H y' to the gradient of x.

    def recorded(self, args: tuple[Any, ...]) -> Any:
        """Evaluates the forward rule once.

        Returns the output, or None if `apply_rule` is needed.
        """
        xs = tuple(map(Tensor.detach, args))
        point = self.recording = self.recording or self._recording(xs)
        if point is None:
            self.records = False
            return None
        try:
            result = applied_to(None, self.rule, self.specialized.jvp, xs, args)
        except ARGUMENT_ERRORS as error:
            self.specialized.note_call("jvp", error)
            raise
        if not _is_pair(result) or not result[1].requires_grad:
            return None
        y, dy = result
        if y.requires_grad:
            fix = (
                " The error also occurs if the first result of the forward rule depends on the "
                "tangents; the rule is called as rule(primals, tangents)."
            )
            raise closed_over_error(self.rule.name, fix=fix)
        # y is detached, because the graph may refer to y, which would be a reference cycle.
        return attach((point, (y.detach(),)), *args, dy)[0]

    def _recording(self, xs: tuple[Tensor, ...]) -> Application | None:
        """Returns the `Application` that calls of the method `recorded` share, or None.

        Returns None if f does not return a single tensor, if the tangent map is not linear (a
        derivative then raises an error), or if the graph of the map has another leaf, which would
        receive a gradient.
        """
        dxs = [ones(*x).requires_grad_() for x in self.avals]
        run = self.specialized.tangent
        tangent = lambda xs, dxs: applied_to(None, self.rule, run, xs, dxs)
        # Saved-tensor hooks are disabled: a checkpoint counts saved tensors, but its recomputation
        # does not build this graph again.
        with unpacked(), restored(Randomness.now(xs)), suppress(GradtoolsError):
            check_linear(self.rule, "tangent", tangent, xs, self.likes)
            leaves = leaves_of([dy for dy in tangent(xs, dxs) if dy is not None])
            is_leaf = self.specialized.outs.get(self.key) is _LEAF
            if is_leaf and {*map(id, leaves)} <= {*map(id, dxs)}:
                maps = self.rule.linearized_from([None] * len(xs), []).without_arrays()
                point = Application(self.rule, maps, 1, _pulled_in_graph, maps.saves)
                point.like_xs, point.ones, point.materializes = self.likes, {"tangent": []}, True
                return point
        return None

    # --- forward mode only

    def pushed(self, args: tuple[Any, ...]) -> Any:
        """Runs the author's code once, and returns the output as a dual number without a graph.

        Returns None if `apply_rule` is needed.
        """
        level = _forward_level()
        xs, dxs = zip(*[upstream.unpack_dual(x, level) for x in args], strict=True)
        there = [dx for dx in dxs if dx is not None]
        if not there:
            return None
        ys: Any
        if self.specialized.jvp is not None:
            try:
                result = self.specialized.jvp(xs, tuple(filled(dxs, self.likes)))
            except ARGUMENT_ERRORS as error:
                self.specialized.note_call("jvp", error)
                raise
            if self.key in self.specialized.outs and _is_pair(result):
                ys, dys = result[:1], result[1:]
            else:
                ys, dys = self.specialized.pushed(xs, result)
        elif any(dx.requires_grad for dx in there):
            return None  # the transpose would have to be differentiated
        else:
            point, outs = self.evaluated(xs)
            everything = (*xs, *outs)
            ys, at = outs[: point.count], [everything[i] for i in point.pushing]
            with torch.no_grad():
                dys = tangent_at(point, at, dxs)
        for y, dy in zip(ys, dys, strict=True):
            if y.requires_grad or is_dual(y) or is_dual(dy):
                raise closed_over_error(self.rule.name)
        apart = [*ys, *dys]
        new = [x for x in apart if x is not None]
        pairs = chain(combinations(new, 2), product(new, (*xs, *there)))
        if len(new) > 2 or any(starmap(upstream.is_alias_of, pairs)):
            apart = without_aliases(apart, xs, there)
        paired = lambda y, dy: y if dy is None else upstream.make_dual(y, dy, level=level)
        return self.outputs(list(map(paired, apart, apart[len(ys) :])))


def _pulled_in_graph(ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
    """Returns the cotangent as the gradient of the last input, the tangent."""
    if _graphs():
        return *pulled_back(ctx, cts), None
    if _is_compiling():  # compiled autograd cannot add a tensor to None
        return *[torch.zeros_like(x) for x in ctx.saved_tensors], cts[0]
    return *(None,) * len(ctx.point.like_xs), cts[0]


def _is_pair(result: Any) -> bool:
    """Returns whether a forward rule returned a tensor and a tangent of equal shape and dtype."""
    if type(result) is not tuple or len(result) != 2:
        return False
    y, dy = result
    return type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype


class Calls:
    """Handles the calls of one `CustomRule`."""

    def __init__(self, of: Any) -> None:
        self.of = of
        # The count 0 allows any number of arguments.
        self.count = 0 if of._needs_binding else len(of._binding.names)
        self.signatures: dict[Any, Signature] = {}

    def call(self, args: tuple[Any, ...], statics: tuple[Any, ...]) -> Any:
        """Returns the output of the rule, or NotImplemented if the arguments have no signature."""
        if _is_compiling() or (len(args) != self.count and self.count):
            return NotImplemented
        structure: tuple[Any, ...] = ()
        if statics or not PLAIN.issuperset(map(type, args)):
            args, structure = self._structure(args, statics)
        if not args:
            return NotImplemented
        key, tracked, plain = structure, False, _levels() is None
        try:
            for x in args:
                if x.layout is not _STRIDED:
                    return NotImplemented
                if is_wrapped(x):
                    plain = False
                key += x.shape, x.dtype, x.device
                tracked = tracked or x.requires_grad
            signature = self.signatures.get(key)
        except (RuntimeError, TypeError):  # a nested tensor has no shape, and a SymInt has no hash
            return NotImplemented
        if signature is None:
            if torch.jit.is_tracing():  # type: ignore[attr-defined]
                return NotImplemented  # sizes are tensors in torch.jit.trace
            signature = self._signature(key, args, structure)
        graphs = tracked and _graphs()
        if plain and not graphs and _forward_level() < 0:
            return signature.value(args, tracked)
        plain = plain and not (ongoing.maps or running.recorded or _modes())
        captured = lambda x: x.requires_grad or is_dual(x)
        if plain and (signature.closed.empty or not signature.closed.captures(captured)):
            out = None
            if _forward_level() >= 0:
                if signature.smooth and not graphs:
                    out = signature.pushed(args)
            elif signature.specialized.bwd is not None:
                return signature.applied(args)
            # Under a checkpoint, the recomputation would run while the graph of the map is
            # recorded.
            elif signature.records and _hooks(False) is None:
                out = signature.recorded(args)
            if out is not None:
                return out
        return signature.outputs(apply_rule(signature.rule, *args))

    def _structure(self, args: Any, statics: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """Returns the tensors, structure and constants of a call."""
        leaves, treedef = self.of._backend.flatten_static(args)
        xs = tuple([x for x in leaves if isinstance(x, Tensor)])
        others = tuple([ARRAY if isinstance(x, Tensor) else x for x in leaves])
        constants = (*statics, *others)
        plain = _CONSTANTS.issuperset(map(type, constants)) and PLAIN.issuperset(map(type, xs))
        return xs if plain else (), (treedef, statics, others, type_key(constants))

    def _signature(self, key: Any, args: tuple[Any, ...], structure: Any) -> Signature:
        """Makes and stores the signature of a first call."""
        treedef, statics, others = (structure or self._structure(args, ())[1])[:3]
        specialized = self.of._specialized(statics, treedef, others)
        avals = tuple([(x.shape, x.dtype, x.device) for x in args])
        return remember(self.signatures, key, Signature(specialized, avals))
