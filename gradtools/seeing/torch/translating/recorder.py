"""Records a PyTorch run in framework-neutral operations: as functions, aten calls or their parts.

Functions that are read better as a whole (an einsum, a cross-entropy) are written down as
PyTorch's Python functions are called; all others when aten's operations run, beneath autograd. What
has no translation is run once more by PyTorch's own decomposition of it, of which each step has
one; what has no decomposition either keeps its name. Writing in place is made functional
(`aliasing.py`); functions with rules of their own stand in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gradtools.errors import GradtoolsError
from gradtools.host_kernels import _BY_KEY
from gradtools.seeing.formulas.recorded import body_of
from gradtools.seeing.torch.operands import SAME, AtenCall
from gradtools.seeing.torch.recording.operations import NO_DATA
from gradtools.seeing.torch.recording.recorder import Operations, Recorder
from gradtools.seeing.torch.recording.values import Write, view_of
from gradtools.seeing.torch.translating import aliasing
from gradtools.seeing.torch.translating.writer import Ref, Writer, as_said, drawn, like
from gradtools.torch import _upstream as upstream
from gradtools.torch._upstream import pytree
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in
from gradtools.torch.live_bytes import inside_of
from gradtools.torch.rerunning import Undo

Tensor = torch.Tensor
Translation = Callable[[Writer, Any], Any]
_DRAWN = """
    rand randn randint randperm rand_like randn_like randint_like normal uniform bernoulli
    multinomial exponential poisson geometric log_normal cauchy random normal_functional
    normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_
"""
DRAWN = frozenset(_DRAWN.split())
_DEEPEST = 2  # a formula is of second order at most


class FormulaRecorder(Recorder[Ref]):
    """What a run computes, and which tensor stands for which value.

    Args:
        undo: As in `Recorder`.
        operations: Translations of aten's operations, by name.
        functions: Translations of functions as they are called.
        rule: Writes down a call of a Function with a rule of its own.
        cast_of: What was cast, and the cast, of a tensor that shows a cast's memory.
    """

    caller, levels = "formula", ("rules", "functions", "operations")

    def __init__(
        self,
        undo: Undo,
        operations: Mapping[str, Translation],
        functions: Mapping[Any, Translation],
        rule: Callable[..., Any],
        cast_of: Callable[[Tensor], tuple[Tensor, Tensor] | None],
    ) -> None:
        super().__init__(undo)
        self.writer = Writer(self.values)
        self.operations, self.functions = operations, functions
        self.rule, self.cast_of = rule, cast_of
        self.lost = False  # whether a derivative inside of f read what no one saw being made
        self.narrow = ""  # a dtype short of double in which a kernel computes whatever it is given
        self.crossed = 0  # how many calls of another framework's functions were written down
        self.tensors: dict[int, Tensor] = {}
        self.fixed: set[int] = set()  # values that depend on no argument

    # --- what runs

    def ruled(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """A function with a rule of its own."""
        if len(self.rules) >= _DEEPEST:
            return apply(*args, **kwargs)
        return self.rule(self, kind, apply, args, kwargs)

    def called(self, fun: Any, args: Any, kwargs: Any) -> Any:
        """A function of PyTorch, as a whole if it is read better so."""
        translation = self.functions.get(fun)
        if translation is not None and upstream.peek_interpreter_stack() is None:
            result = self._as_a_whole(translation, fun, args, kwargs)
            if result is not None:
                return result[0]
        return fun(*args, **kwargs)

    # --- which tensor stands for which value

    def new(self, x: Any, name: str = "") -> Ref:
        """A new value."""
        return self.writer.value(like(x), name)

    def hold(self, x: Tensor, value: Ref, alone: bool = False) -> None:
        """From now on x has this value; alone: others that show the same memory have not."""
        self.table.hold(x, value, alone)
        self.tensors[value.number] = x

    def of(self, x: Tensor) -> Ref:
        """The value of a tensor."""
        with upstream.DisableTorchFunction():  # a mode may give another tensor in its place
            return super().of(x)

    def rewritten(self, x: Tensor, before: Ref, writes: Sequence[Write[Ref]]) -> Ref:
        """What it shows now of the memory that was written to."""
        return self._read(x)

    def _read(self, x: Tensor) -> Ref:
        """What a tensor shows of memory that is known."""
        shown = self.table.memory(x)
        assert shown is not None
        return aliasing.read(self.writer, shown.value, aliasing.places(x, shown.root))

    def met(self, x: Tensor) -> Ref:
        """A tensor that nothing made before our eyes."""
        result = self.cast_of(x)
        if result is not None:
            of, cast = result
            self.hold(cast, Ref(self.of(of).number, *like(cast)))
            if (known := self.table.get(x)) is not None:
                return known.value
        if self.table.memory(x) is not None:  # a view of something known
            return self._read(x)
        if id(x) in self.names or x.requires_grad:
            self.lost = self.lost or id(x) not in self.names
            ref = self.new(x, self.names.get(id(x), ""))
            self.capture(x, ref.number)
            return ref
        self.lost = self.lost or upstream.current_node() is not None  # type: ignore[attr-defined]
        self.undo.watch(x)
        return self.constant(x)

    def constant(self, x: Tensor) -> Ref:
        """A tensor that is held as it is."""
        with self.silent(), upstream.disable_current_modes():
            value = x.detach().resolve_conj().resolve_neg().to_dense().cpu()
            if value.dtype in (torch.bfloat16, torch.float16):
                value = value.float()
            array = value.clone().numpy()
        made = self.writer.constant(array, root=True)
        self.fixed.add(made.number)
        return Ref(made.number, made.shape, like(x)[1])

    def noted(self, xs: Sequence[Tensor]) -> list[Ref | None]:
        """What an operation gives besides: held as it was, for it has no derivative."""
        return [None if is_inexact(x) else self.constant(x) for x in xs]

    def value_of(self, ref: Ref) -> np.ndarray | None:
        """The numbers of an integer or boolean value, if its tensor is known."""
        x = self.tensors.get(ref.number)
        if x is None:
            return None
        with self.silent(), upstream.disable_current_modes():
            return x.detach().cpu().numpy().copy()

    def true_places(self, mask: Ref) -> tuple[np.ndarray, ...]:
        """Where a mask is true: integers for each axis."""
        value = self.value_of(mask)
        if value is None:
            raise GradtoolsError("formula: a mask that is used as an index is not known.")
        return value.nonzero()

    def places_of(self, bound: Any) -> np.ndarray:
        """For each element of a result the place in the first operand, -1 where it is none."""
        with self.silent(), upstream.disable_current_modes():
            count = torch.arange(1, bound.self.size + 1, dtype=torch.float64)
            result = bound.again(count.reshape(bound.self.shape))
            return result.round().long().numpy() - 1  # type: ignore[no-any-return]

    def _written(self, x: Tensor, ref: Ref) -> None:
        """x has a new value, in place."""
        shown = self.table.memory(x)
        assert shown is not None
        root = shown.root
        if view_of(x) == view_of(root):
            shown.value = ref
        elif {shown.value.number, ref.number} <= self.fixed:
            shown.value = self.constant(root)
        else:
            where = aliasing.places(x, root)
            shown.value = aliasing.write(self.writer, shown.value, where, ref)
        self.table.write(x, ref)
        self.hold(x, ref)
        if self.table.get(root) is not None:
            self.hold(root, shown.value)

    # --- operations

    def operated(self, call: AtenCall) -> Any:
        """An operation of aten."""
        name, args = call.raw, call.args
        if name in SAME:
            out = call.run()
            self.hold(out, self.of(args[0]))
            return out
        if name == "copy_" and view_of(args[0]) == view_of(args[1]):  # the end of y[0] += 1
            return call.run()
        if name.removeprefix("_foreach_").rstrip("_") in _OF_EACH and name.startswith("_foreach_"):
            with Operations(self):
                return _each(name, args, call.kwargs)
        bound = self._bound(call)
        writes = self.keep_written(call)
        usual = drawn if name in DRAWN else as_said
        translation = self.operations.get(_functional(name, bool(writes)), usual)
        out = call.run()
        made = [y for y in tensors_in(out) if not any(y is x for x in writes)]
        for y in made:
            if y.layout is not torch.strided:
                layout = str(y.layout).removeprefix("torch.")
                raise GradtoolsError(
                    f"formula: f makes a {layout} tensor ({name}); a formula is of dense ones. "
                    "Give f dense arguments, or leave to_sparse out."
                )
        outs = made or writes
        self.writer.native = f"aten.{name}"
        bound.likes = [like(y) for y in outs]
        bound.outs, bound.writes, bound.recorder = outs, writes, self
        bound.said, bound.usual = lambda: call.said(out), call.usual
        bound.again = lambda *given: call.func(*given, *args[len(given) :], **call.kwargs)
        made_anew = name in NO_DATA or all(x.number in self.fixed for x in bound.given)
        if made_anew and name not in DRAWN:
            self._note(outs, [self.constant(y) for y in outs], not made)
            return out
        result = translation(self.writer, bound)
        if result is None and not writes:
            parts = self._in_parts(call)
            if parts is not None:
                return parts[0]
        if result is None:
            result = self._unknown(bound, outs, call)
        refs = list(result) if isinstance(result, list | tuple) else [result]
        self._note(outs, refs[: len(outs)], not made)
        if made:  # what else is written into, such as running statistics, is what it became
            self._note(writes, [self.constant(x) for x in writes], written=True)
        return out

    def _in_parts(self, call: AtenCall) -> tuple[Any] | None:
        """The result of PyTorch's own decomposition, if all parts of it have a translation."""
        decomposed = upstream.decompositions().get(call.func)
        if decomposed is None:
            return None
        frame = self.writer.frames[-1]
        before = len(frame)
        with Operations(self):
            out = decomposed(*call.args, **call.kwargs)
        if out is NotImplemented or any(n.operation == "opaque" for n in frame[before:]):
            del frame[before:]
            return None
        return (out,)

    def _note(self, outs: Sequence[Tensor], refs: Sequence[Ref | None], written: bool) -> None:
        for y, ref in zip(outs, refs, strict=True):
            if ref is None:
                continue
            if written:
                self._written(y, self._beneath(y, self._fitted(y, ref)))
            else:
                self.hold(y, self._stopped(y, self._fitted(y, ref)))

    def _fitted(self, y: Tensor, ref: Ref) -> Ref:
        """In the result's shape and dtype."""
        shape, dtype = like(y)
        if ref.shape != shape:
            ref = self.writer.broadcast(ref, shape)
        return Ref(self.writer.cast(ref, dtype).number, shape, dtype)

    def _stopped(self, y: Tensor, ref: Ref) -> Ref:
        """Without a derivative where the user switched it off."""
        off = is_inexact(y) and not self.rules and not torch.is_grad_enabled()
        if not off or ref.number in self.fixed:
            return ref
        return self.writer("stop", ref, shape=ref.shape, dtype=ref.dtype)

    def _beneath(self, y: Tensor, ref: Ref) -> Ref:
        """What is written while derivatives are off changes the value, and not the derivative."""
        stopped = self._stopped(y, ref)
        if stopped is ref or not y.requires_grad:
            return stopped
        before = self.of(y)
        moved = self.writer("stop", self.writer.sub(ref, before))
        return Ref(self.writer.add(before, moved).number, ref.shape, ref.dtype)

    def _unknown(self, bound: Any, outs: Sequence[Tensor], call: AtenCall) -> list[Ref]:
        """An operation without a translation; what it counts or compares is what it was."""
        self.writer.native = f"aten.{call.raw}"
        if (result := self._across(bound, call.func, call.args)) is not None:
            return result
        if not any(is_inexact(y) for y in outs):
            return [self.constant(y) for y in outs]
        if call.func.namespace == "gradtools" and self.rules:
            self.writer.native = self.rules[-1][0] or self.writer.native
        computing = Computing(call.func, call.args, call.kwargs)
        more: dict[str, Any] = {"function": computing.value, "adjoint": computing.adjoint}
        some = [like(y) for y in outs if is_inexact(y)]
        made = iter(self.writer.node("opaque", bound.given, some, **more))
        return [next(made) if is_inexact(y) else self.constant(y) for y in outs]

    def _across(self, bound: Any, func: Any, args: Any) -> list[Ref] | None:
        """A call of a function of another framework: what that one writes, as one node."""
        inside = inside_of(func, args)
        if inside is None:
            return None
        recorded = inside.formula([x.detach().cpu().numpy() for x in args[1]], args[2])
        if recorded is None:
            return None
        self.crossed += 1
        held = []
        for v in recorded.captured:
            x = torch.as_tensor(np.array(recorded.held[v]))
            held.append(self.writer.value(like(x), recorded.values[v].name))
            self.captured[held[-1].number] = x
        return self.writer.node("call", [*bound.given, *held], bound.likes, [body_of(recorded)])

    def _bound(self, called: AtenCall) -> SimpleNamespace:
        """The arguments by name, with values in place of tensors."""
        result, given = SimpleNamespace(), []
        for name, value in called.arguments():
            value = self._valued(value)
            given += list(refs_in(value))
            setattr(result, name, value)
        result.given, result.operands = given, lambda: self._valued(called.operands())
        return result

    def _valued(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.of(x)
        if isinstance(x, list | tuple):
            return [self._valued(v) for v in x]
        return x

    def _as_a_whole(self, translation: Translation, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function; None if it is better taken apart."""
        bound = SimpleNamespace(
            args=self._valued(tuple(args)),
            kwargs={k: self._valued(v) for k, v in kwargs.items()},
            recorder=self,
        )
        accepts = getattr(translation, "accepts", None)
        if accepts is not None and not accepts(bound):
            return None
        with self.silent():
            out = func(*args, **kwargs)
        outs = list(tensors_in(out))
        bound.likes = [like(y) for y in outs]
        self.writer.native = getattr(func, "__name__", str(func))
        result = translation(self.writer, bound)
        refs = list(result) if isinstance(result, list | tuple) else [result]
        for y, ref in zip(outs, refs, strict=True):
            ref = self._stopped(y, self._fitted(y, ref))
            self.hold(y, ref, alone=self.table.is_shown(y))
        return (out,)


class Computing:
    """How PyTorch computes a function of tensors: at other values of those that are in its call."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, tuple(args), dict(kwargs)
        self.kept = [_BY_KEY.get(a) for a in args if isinstance(a, str)]  # a kernel's call
        self.xs = list(tensors_in([self.args, self.kwargs]))
        self.tracked = [x.requires_grad for x in self.xs]

    def _run(self, values: Sequence[np.ndarray]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs that are tracked, and outputs."""
        made = [torch.tensor(v).to(x.dtype) for v, x in zip(values, self.xs, strict=True)]
        xs = [x.requires_grad_(tracked) for x, tracked in zip(made, self.tracked, strict=True)]
        left = iter(xs)
        swapped = lambda a: next(left) if isinstance(a, Tensor) else a
        args, kwargs = pytree.tree_map(swapped, (self.args, self.kwargs))
        return xs, [y for y in tensors_in(self.func(*args, **kwargs)) if is_inexact(y)]

    def value(self, *values: np.ndarray) -> list[np.ndarray]:
        """The results."""
        with upstream.disable_current_modes(), torch.enable_grad():
            return [y.detach().numpy() for y in self._run(values)[1]]

    def adjoint(self, *both: np.ndarray) -> list[np.ndarray]:
        """The cotangents of the inputs, of inputs and of cotangents of the results."""
        count = len(self.xs)
        with upstream.disable_current_modes(), torch.enable_grad():
            xs, ys = self._run(both[:count])
            caller = [x for x in xs if x.requires_grad]
            pairs = zip(both[count:], ys, strict=True)
            given = [(y, torch.tensor(c).to(y.dtype)) for c, y in pairs if y.requires_grad]
            result = torch.autograd.grad(
                [y for y, _ in given], caller, [c for _, c in given], allow_unused=True
            )
        place = {id(x): g for x, g in zip(caller, result, strict=True)}
        grads = [place.get(id(x)) for x in xs]
        given_back = zip(grads, both, strict=False)
        return [np.zeros(v.shape) if g is None else g.numpy() for g, v in given_back]


_OF_EACH = frozenset(
    ["add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "tanh", "sigmoid", "zero"]
    + ["copy", "lerp", "addcmul", "addcdiv"]
)


def _each(name: str, args: Any, kwargs: Any) -> list[Tensor] | None:
    """An operation on lists of tensors, one tensor after the other."""
    base = name.removeprefix("_foreach_")
    operation = getattr(torch.ops.aten, base)
    if base.startswith("addc") and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    at = lambda x, k: x[k] if isinstance(x, list | tuple) else x
    result = [
        operation(*(at(x, k) for x in args), **{key: at(x, k) for key, x in kwargs.items()})
        for k in range(len(args[0]))
    ]
    return None if base.endswith("_") else result


def _functional(name: str, writes: bool) -> str:
    return name.removesuffix("_") if writes and not name.endswith("__") else name


def refs_in(x: Any) -> Iterator[Ref]:
    """The values in an argument."""
    if isinstance(x, Ref):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from refs_in(item)
