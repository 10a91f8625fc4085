"""Trials of a Function's double backward: one recorded call is tested by finite differences.

With g(x, ct) the gradient that a torch.autograd.Function returns, autograd's derivative of g is
compared with the central difference

    (g(x + h v, ct) - g(x - h v, ct)) / 2 h

and alike in ct. The verdicts are kept by class. The calls of a class in a function are recorded by
running the function again. double_backward.py uses the verdicts.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import (
    CPP_FUNCTION,
    CPP_NODE,
    graph_of,
    is_cpp_function,
    is_torchscript,
)
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.modes import dual_level, unpacked
from gradtools.torch.patches import functions_applied
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rerunning import program_of, rerun
from gradtools.torch.rules.checking import value_of
from gradtools.torch.state import Snapshot
from gradtools.torch.trials import Untestable, differ, is_tracked, on_one_line, paired, slope, wave

Tensor = torch.Tensor
Args = tuple[Any, ...]


class _Raises(Exception):
    """Differentiating the gradient raises, so nothing is lost silently."""


@dataclass(frozen=True, eq=False, repr=False)
class TrialCall:
    """The arguments of one call of a class, copied.

    Attributes:
        args: The copied arguments. Tensors keep `requires_grad`. An object that references such a
            tensor, as a module does its parameters, is copied and references the copy.
        held: The positions of tensors that other arguments reference; None if those cannot be
            copied.
        originals: The arguments themselves; empty inside of a transform.
    """

    args: Args
    held: list[int] | None
    originals: Args = ()

    @classmethod
    def of(cls, args: Args) -> TrialCall:
        wrapped = any(isinstance(x, Tensor) and upstream.is_wrapped(x) for x in args)
        originals = () if wrapped else args
        with upstream.temporarily_clear_interpreter_stack():
            copies = [value_of(x).clone() if isinstance(x, Tensor) else x for x in args]
            others = [k for k, x in enumerate(args) if not isinstance(x, Tensor)]
            moving = [k for k, x in enumerate(args) if isinstance(x, Tensor) and is_tracked(x)]
            for k in moving:
                copies[k] = copies[k].requires_grad_()
            known = _referenced_ids([args[k] for k in others])
            held = [k for k in moving if id(args[k]) in known]
            if held:
                memo = {id(args[k]): copies[k] for k in held}
                try:
                    for k in others:
                        copies[k] = copy.deepcopy(args[k], dict(memo))
                except Exception:  # a tensor that is computed, a generator, a lock
                    return cls(tuple(copies), None, originals)
                if _referenced_ids([copies[k] for k in others]) & {*memo}:
                    return cls(tuple(copies), None, originals)
            return cls(tuple(copies), held, originals)


def _referenced_ids(xs: Sequence[Any]) -> set[int]:
    """The ids of the tensors that these objects reference."""
    return {id(x) for x, _ in Snapshot.of(list(xs), []).reached.watched}


class InnerGraphs(TorchFunctionMode):
    """A function mode that sets create_graph=True for torch.autograd.grad inside of a backward."""

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun is torch.autograd.grad:
            args, kwargs = args[:4], {**kwargs, "create_graph": True}
        return fun(*args, **kwargs)


@dataclass(eq=False, repr=False)
class Trial:
    """One call of a class, as a map g of its differentiated arguments xs and of vectors.

    g is the gradient that the class returns, and the vectors are cotangents. If `pushed`, g is the
    tangent by the class's own jvp, and the vectors are the tangents of xs.

    Attributes:
        apply: Calls the class.
        call: The arguments.
        pushed: Whether g is the tangent.
        attaches: Whether torch.autograd.grad inside of a backward creates graphs.
        args: The arguments, with detached tensors.
        moving: The positions of xs among the arguments.
        randomness: The random state before the call.
        weights: The weights w of a gradient; only the scalar Re<w, g> is tested.
    """

    apply: Callable[..., Any]
    call: TrialCall
    pushed: bool
    attaches: bool = False

    def __post_init__(self) -> None:
        args = self.call.args
        self.moving = [k for k, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        self.args = tuple([x.detach() if isinstance(x, Tensor) else x for x in args])
        self.randomness = Randomness.now([x for x in self.args if isinstance(x, Tensor)])
        self.weights = [wave(self.args[k], 3.0) for k in self.moving]

    def lost(self, forward: bool) -> set[str] | None:
        """What autograd loses of g at the arguments and nearby: "inputs", "cotangents" or neither.

        None if undecided: differentiating g raises, or g is zero.

        Raises:
            Untestable: g cannot be evaluated for finite differences.
        """
        result: set[str] | None = None
        errors: list[Exception] = []
        for shift in (0.0, 0.1):
            try:
                with restored(self.randomness), torch.inference_mode(False), unpacked():
                    xs = [self.args[k] + shift * wave(self.args[k], 1.0) for k in self.moving]
                    vs = [wave(y, 2.0) for y in (xs if self.pushed else self._called(xs)[1])]
                    point = [*xs, *vs]
                    if not self._value(point):
                        continue
                    kinds = ["inputs"] * len(xs) + ["cotangents"] * len(vs)
                    loses = [self._loses(point, k, forward) for k in range(len(point))]
                result = {*compress(kinds, loses)} | (result or set())
            except Exception as error:
                errors.append(error)
        if result is not None or len(errors) < 2 or any(isinstance(e, _Raises) for e in errors):
            return result
        raise Untestable(f"near its arguments it raises {on_one_line(errors[0])}") from errors[0]

    def _loses(self, point: list[Tensor], k: int, forward: bool) -> bool:
        """Whether autograd's derivative in entry k differs from finite differences."""

        def along(v: Tensor) -> bool:
            at = lambda step: [self._value([*point[:k], point[k] + step * v, *point[k + 1 :]])]
            eps = torch.finfo(v.dtype).eps
            try:
                known = (self._pushed_along if forward else self._pulled_along)(point, k, v)
            except Exception as why:
                if not differ(at, [0.0], eps):
                    return False  # within rounding
                raise _Raises from why
            return differ(at, [known], eps)

        try:
            return along(wave(point[k], 1.5))
        except _Raises:
            raise
        except Exception:  # it may validate values, such as signs: a step along x keeps these
            return along(wave(torch.ones_like(point[k]), 1.5) * point[k])

    def _pulled_along(self, point: list[Tensor], k: int, v: Tensor) -> float:
        point = [x.detach() for x in point]
        point[k] = point[k].requires_grad_()
        return slope(self._paired(self._derivative(point, True)), [point[k]], [v])

    def _pushed_along(self, point: list[Tensor], k: int, v: Tensor) -> float:
        point = [*point[:k], forward_ad.make_dual(point[k], v), *point[k + 1 :]]
        total = self._paired(self._derivative(point, True))
        tangent = forward_ad.unpack_dual(total).tangent
        return 0.0 if tangent is None else float(tangent)

    def _value(self, point: Sequence[Tensor]) -> float:
        return float(self._paired(self._derivative(point, False)).detach())

    def _paired(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Re<w, g>."""
        return paired(grads, None if self.pushed else self.weights)

    def _derivative(self, point: Sequence[Tensor], again: bool) -> Sequence[Tensor | None]:
        """g at a point; with a graph if `again`."""
        xs, vs = point[: len(self.moving)], point[len(self.moving) :]
        if self.pushed:
            with dual_level():
                duals = [forward_ad.make_dual(x, t) for x, t in zip(xs, vs, strict=True)]
                return [forward_ad.unpack_dual(y).tangent for y in self._called(duals)[1]]
        tracked, outs = self._called(xs)
        if not (again and self.attaches):
            return torch.autograd.grad(outs, tracked, vs, create_graph=again, allow_unused=True)
        with InnerGraphs():  # by the engine, for torch.autograd.grad disables modes in its call
            how = {"allow_unreachable": True, "accumulate_grad": False}
            return upstream.run_engine(  # type: ignore[no-any-return]
                tuple(outs), tuple(vs), True, True, tuple(tracked), **how
            )

    def _called(self, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Calls the class; returns the differentiated arguments and the outputs."""
        args = [x.clone() if isinstance(x, Tensor) else x for x in self.args]
        tracked = [x if x.requires_grad else x.requires_grad_() for x in (x.view_as(x) for x in xs)]
        for k, x in zip(self.moving, tracked, strict=True):
            args[k] = x.clone()  # neither a leaf nor a view: it may be changed in place
        if self.call.held:
            memo = {id(self.call.args[k]): args[k] for k in self.call.held}
            args = [x if isinstance(x, Tensor) else copy.deepcopy(x, dict(memo)) for x in args]
        if self.randomness is not None:
            self.randomness.restore()
        with torch.enable_grad():
            return tracked, _tracked_outputs(self.apply(*args))

    # --- arguments for autograd alone

    def is_unread(self) -> bool:
        """Whether an argument is passed for autograd only, and its value is read elsewhere.

        Then no result depends on it, but its gradient depends on other arguments: the value that is
        read cannot be perturbed. (The gradient of a straight-through estimator depends on none.) Or
        its copy has no gradient, because the class differentiates the original object.
        """
        xs, originals = [*self.args], self.call.originals
        with restored(self.randomness), torch.inference_mode(False), unpacked():
            try:
                outs, grads = self._numbers(xs)
            except Exception:  # the trial itself will report it
                return False
            for place, k in enumerate(self.moving):
                g = grads[place]
                if g is None and originals:
                    with torch.enable_grad():
                        ys = _tracked_outputs(self.apply(*originals))
                        cts = [torch.ones_like(y) for y in ys]
                        own = torch.autograd.grad(ys, [originals[k]], cts, allow_unused=True)
                    if own[0] is not None:
                        return True
                if g is None or not g.any() or self._moves(xs, k, [*outs, *grads], None):
                    continue
                for j, x in enumerate(xs):
                    inexact = j != k and isinstance(x, Tensor) and is_inexact(x)
                    if inexact and self._moves(xs, j, [g], place):
                        return True
        return False

    def _moves(self, xs: Sequence[Any], k: int, before: Sequence[Any], place: int | None) -> bool:
        """Whether outputs and gradients, or the gradient at one place, change with argument k."""
        for other in (xs[k] + wave(xs[k], 1.5), -2 * xs[k], 10 * wave(xs[k], 0.7)):
            try:
                outs, grads = self._numbers([*xs[:k], other, *xs[k + 1 :]])
            except Exception:  # the value matters
                return True
            after = [*outs, *grads] if place is None else [grads[place]]
            if len(after) != len(before):
                return True
            for a, b in zip(after, before, strict=True):
                if a is not b and (a is None or b is None or not torch.equal(a, b)):
                    return True
        return False

    def _numbers(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs and the gradient at other arguments."""
        trial = copy.copy(self)
        trial.args = tuple(args)
        xs = [args[k] for k in self.moving]
        outs = [y.detach().clone() for y in trial._called(xs)[1]]
        vs = [wave(torch.ones_like(y), 2.0) for y in outs]
        return outs, [*trial._derivative([*xs, *vs], False)]


def _tracked_outputs(outs: Any) -> list[Tensor]:
    outs = outs if isinstance(outs, tuple | list) else (outs,)
    return [y for y in outs if isinstance(y, Tensor) and y.requires_grad]


# --- verdicts by class ---------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A class, and which of its arguments are differentiated.

    pushed: Whether its tangent (by its jvp) is differentiated again, and not its gradient.
    """

    kind: Any
    needs: tuple[bool, ...]
    pushed: bool = False

    @property
    def name(self) -> str:
        if isinstance(self.kind, _CppFunction):
            return f"the C++ torch::autograd::Function {self.kind.name}"
        name = self.kind.__name__
        if not name.startswith(_GENERATED):
            return f"the torch.autograd.Function {name.removeprefix('Vmapped')}"
        return f"the custom operator {name.removeprefix(_GENERATED).rpartition('_')[0]}"

    @property
    def unseen(self) -> str:
        """The reason why no call was recorded, for errors."""
        if isinstance(self.kind, _CppFunction):
            return (
                "evaluated a second time, f calls no operator of torch.ops in whose graph it is "
                "(what is bound to Python in another way is not seen; bind it by TORCH_LIBRARY)"
            )
        return "evaluated a second time, f does not call it in this thread"

    def fine(self, forward: bool) -> bool | None:
        """Whether it lost nothing in a trial; None without a trial."""
        if self == TORCHSCRIPT:
            return not forward
        verdict = _VERDICTS.get(self.kind, {}).get((self.needs, self.pushed, forward))
        return None if verdict is None else verdict == FINE

    @property
    def attaches(self) -> bool:
        """Whether nothing is lost if the backward's own torch.autograd.grad creates graphs."""
        return _VERDICTS.get(self.kind, {}).get((self.needs, self.pushed, False)) == ATTACHES

    def record(self, verdict: str, forward: bool) -> None:
        _VERDICTS.setdefault(self.kind, {})[self.needs, self.pushed, forward] = verdict


@dataclass(frozen=True)
class _CppFunction:
    """A C++ torch::autograd::Function, known by its name."""

    name: str


TORCHSCRIPT = Key(_CppFunction("TorchScript"), ())
_cpp_function = cache(_CppFunction)  # one object for each name, for the weak dictionary
_GENERATED = "GeneratedBackwardFor_"
FINE, LOSES, ATTACHES = "fine", "loses", "loses but where inner derivatives keep their graphs"
# A class that lost is tested again for each use: one that takes functions may lose the derivative
# of one function and not of another.
_VERDICTS: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()


def key_of(node: Any, pushed: bool = False) -> Key:
    if is_torchscript(node):
        return TORCHSCRIPT
    if type(node).__name__ == CPP_NODE:
        return Key(_cpp_function(node.name().removeprefix(CPP_FUNCTION)[:-1]), ())
    return Key(upstream.forward_class(type(node)), tuple(node.needs_input_grad), pushed)


def verdict_on(
    key: Key, call: TrialCall, forward: bool, apply: Any = None, noted: bool = True
) -> set[str] | None:
    """Tests a call and records the verdict of its class: what it loses, or None if undecided.

    Raises:
        Untestable: The call cannot be tested.
    """
    if call.held is None:
        raise Untestable(_HELD)
    trial = Trial(apply or key.kind.apply, call, key.pushed)
    if trial.is_unread():
        raise Untestable(_HELD)
    result = trial.lost(forward)
    if result is not None and noted:
        key.record(FINE if not result else LOSES, forward)
    if result and not (key.pushed or forward):
        attaching = Trial(trial.apply, call, False, attaches=True)
        if attaching.lost(False) == set():
            key.record(ATTACHES, forward)
    return result


_HELD = (
    "an argument is handed in for autograd's sake alone, and the function reads in its place what "
    "holds it, as a module holds its parameters"
)


def lost_in_rerun(fun: Fun, leaves: Sequence[Tensor], key: Key, forward: bool) -> set[str]:
    """What calls of a class in fun lose. Reruns fun to record them, and undoes its side effects.

    Raises:
        Untestable: No call could be tested.
    """
    result: list[set[str] | None] = []
    why: list[str] = []

    def tried(call: TrialCall, apply: Any = None) -> None:
        if len(result) < _CALLS:
            try:
                result.append(verdict_on(key, call, forward, apply, noted=False))
            except Untestable as error:
                why.append(str(error))

    operators = _OperatorCalls(key, tried)
    try:
        with _forwards(key) as calls, operators, upstream.temporarily_clear_interpreter_stack():
            rerun(program_of(fun), leaves)
    except Exception as error:
        why.append(f"evaluated a second time, f raises {on_one_line(error)}")
    with upstream.temporarily_clear_interpreter_stack(), torch.enable_grad():
        for call in calls.recorded or calls.of_others:
            tried(call)
    if not result or _HELD in why:
        raise Untestable((*why, key.unseen)[0])
    lost = set[str]().union(*[each for each in result if each is not None])
    if any(each is not None for each in result) and not (lost and key.attaches):
        key.record(LOSES if lost else FINE, forward)
    return lost


_CALLS = 4  # how many calls of one class in f are tested


class _RecordedCalls:
    """Recorded calls; exempt from the restoring of state after the rerun."""

    never_changes = True

    def __init__(self) -> None:
        self.recorded: list[TrialCall] = []
        self.of_others: list[TrialCall] = []  # of classes that the same statement makes


def _codes_of(kind: Any) -> list[Any]:
    """The code of a class's methods, the same for the classes that one `class` statement makes."""
    methods = (getattr(kind, name) for name in ("forward", "setup_context", "backward", "jvp"))
    return [getattr(method, "__code__", method) for method in methods]


@contextmanager
def _forwards(key: Key) -> Iterator[_RecordedCalls]:
    """Records this thread's calls of a class, by patching its `forward`.

    A call by a bound `apply` or from C++ reaches `forward`, too. A class that f makes anew in each
    call has none, and is tried by those of the new one.
    """
    result = _RecordedCalls()
    if not isinstance(key.kind, type):
        yield result
        return
    kind: Any = key.kind
    thread, own, codes = threading.get_ident(), vars(kind).get("forward"), _codes_of(kind)
    forward = kind.forward
    old = kind.setup_context is torch.autograd.Function.setup_context  # forward takes ctx as well

    def note(calls: list[TrialCall], args: Args) -> None:
        needs = tuple([isinstance(x, Tensor) and is_tracked(x) for x in args])
        fits = needs == key.needs[: len(needs)]
        if key.pushed:  # the rerun differentiates all inputs that have tangents
            fits = any(needs) and all(a <= b for a, b in zip(key.needs, needs, strict=False))
        if fits and threading.get_ident() == thread and len(calls) < _CALLS:
            calls.append(TrialCall.of(args))

    def noted(*given: Any, **kwargs: Any) -> Any:
        note(result.recorded, given[1:] if old else given)
        return forward(*given, **kwargs)

    def applied(other: Any, beneath: Callable[..., Any], args: Args, kwargs: Any) -> Any:
        if other is not kind and _codes_of(other) == codes:
            note(result.of_others, args)
        return beneath(*args, **kwargs)

    kind.forward = staticmethod(noted)
    try:
        with functions_applied(applied, of_rules=False):
            yield result
    finally:
        if own is None:
            del kind.forward
        else:
            kind.forward = own


class _OperatorCalls(TorchFunctionMode):
    """A function mode that tests the calls of operators whose graph contains a C++ Function."""

    def __init__(self, key: Key, tried: Callable[[TrialCall, Any], None]) -> None:
        super().__init__()
        self.key, self.tried = key, tried

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        out = fun(*args, **(kwargs or {}))
        if isinstance(self.key.kind, _CppFunction) and isinstance(fun, _OPERATORS):
            flat, treedef = upstream.tree_flatten((args, kwargs or {}))
            outs = [y for y in upstream.tree_leaves(out) if isinstance(y, Tensor)]
            own = graph_of(outs) - graph_of([x for x in flat if isinstance(x, Tensor)])
            if any(is_cpp_function(node) and key_of(node) == self.key for node in own):

                def call(*flat: Any) -> Any:
                    args, kwargs = upstream.tree_unflatten(flat, treedef)
                    return fun(*args, **kwargs)

                self.tried(TrialCall.of(tuple(flat)), call)
        return out


_OPERATORS = (upstream.OpOverload, upstream.OpOverloadPacket)
