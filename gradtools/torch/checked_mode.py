"""PyTorch's half of `gradtools.testing.checked`: runs f again, with what it stops held.

A `TorchFunctionMode` sees the operations of f. What f stops (`detach`, `.data`, the results of a
`no_grad` block) is recorded in the first run and put back in the others. Inside of an
autograd.Function gradients are off without a call that says so, so nothing is held there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from gradtools.code_origin import definition_of, innermost, lines_above
from gradtools.testing.checked_mode import CheckedProgram, functions_within, here, set_here
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.module_arguments import Opened
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
REHEARSES = False  # the operator's own run of f has values
_DATA: Any = Tensor.data
_STOPS = {Tensor.detach, Tensor.detach_, _DATA.__get__}
_BACKWARD = {torch.autograd.grad, Tensor.backward, torch.autograd.backward}
_LEAVING = {"item", "tolist", "numpy", "__float__", "__int__", "__complex__", "__array__"}
_WRITING = {"batch_norm", "instance_norm", "__setitem__"}


# --- what `checked` calls ------------------------------------------------------------------------


def scope(own: bool) -> AbstractContextManager[None]:
    return nullcontext()


def unchanged() -> AbstractContextManager[None]:
    """Random streams are put back."""
    return restored(Randomness.everywhere({"cuda"} if torch.cuda.is_initialized() else ()))


def numbers(xs: Sequence[Any]) -> list[Any]:
    """Tensors as wide NumPy arrays."""
    wide = lambda x: x.detach().to("cpu", torch.complex128 if x.is_complex() else torch.float64)
    plain = lambda x: wide(x).resolve_conj().resolve_neg().numpy().copy()
    return [None if x is None else plain(x) for x in xs]


def like(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """NumPy arrays as tensors like others."""
    made = lambda v, x: None if v is None else torch.as_tensor(v).to(x.device, x.dtype)
    return [made(v, x) for v, x in zip(values, likes, strict=True)]


def traced(xs: Sequence[Any]) -> bool:
    inside = torch.compiler.is_compiling() or upstream.peek_interpreter_stack() is not None
    return inside or any(isinstance(x, Tensor) and upstream.is_wrapped(x) for x in xs)


@contextmanager
def native(xs: Sequence[Any]) -> Iterator[Any]:
    """The values of xs, and which of them PyTorch may differentiate at; empty if none."""
    moving = [isinstance(x, Tensor) and x.requires_grad for x in xs]
    on = torch.is_grad_enabled() and not traced(xs)
    values = [x.detach() if m else x for x, m in zip(xs, moving, strict=True)]
    yield (values, moving) if on else ([], [])


def program_of(backend: Any, fun: Any, leaves: Sequence[Tensor], captures: bool) -> Any:
    made = HeldProgram(backend, fun, leaves, captures)
    return made if made.leaves else None


def plain(backend: Any, fn: Callable[..., Any], xs: Sequence[Tensor]) -> HeldProgram:
    return HeldProgram(backend, lambda *a: (fn(*a), []), xs, watched=False)


class HeldProgram(CheckedProgram, TorchFunctionMode):
    """f, which runs again at other points.

    Args:
        captures: Whether tensors that f captures, and that require gradients, are leaves too.
        watched: Whether what f stops is held.
    """

    half = sys.modules[__name__]

    def __init__(
        self, backend: Any, fun: Any, leaves: Any, captures: bool = False, watched: bool = True
    ) -> None:
        TorchFunctionMode.__init__(self)
        CheckedProgram.__init__(self, backend, fun, leaves)
        within = functions_within(fun)
        self.watched, self.dtypes = watched, {x.dtype for x in leaves}
        self.opened = [f for f in within if isinstance(f, Opened)]
        self.start = RunState.now(Held(within[-1:], {x.device.type for x in leaves}))
        self.written: list[tuple[Tensor, Tensor]] = []  # what f writes in place, and its old value
        self.stopped, self.captured = dict[int, Any](), list[Tensor]()
        outs = self._run(leaves)
        if captures:
            self.captured = list(dict.fromkeys(leaves_of(outs)))
            self.written += [(x, x.detach().clone()) for x in self.captured]
            self.leaves += [x.detach() for x in self.captured]
            self.dtypes |= {x.dtype for x in self.captured}
        self.base, self.recorded = numbers(outs), self.values
        self.stopped.clear()

    @property
    def eps(self) -> float:
        """The precision of the coarsest dtype."""
        return max(torch.finfo(dtype).eps for dtype in self.dtypes)

    def held(self, *xs: Tensor) -> list[Tensor]:
        return self._run(xs)

    def pullback(self, given: Sequence[Any]) -> Callable[..., list[Tensor]]:
        def pulled(outs: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
            pairs = zip(outs, like(given, outs), strict=True)
            reached = [(y, v) for y, v in pairs if v is not None and y.requires_grad]
            if not reached:
                return [torch.zeros_like(x) for x in moved]
            ys, seeds = zip(*reached, strict=True)
            options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
            return list(torch.autograd.grad(ys, moved, seeds, **options))

        return lambda *xs: self._run(xs, pulled)

    def edit(self, rule: Any, xs: Sequence[Tensor]) -> list[Tensor]:
        """An edit, which is left out."""
        self.edited = True
        with set_here(own=here.own + 1):
            if rule.name == "straight_through":
                return [xs[1] + self.hold((xs[0] - xs[1]).detach())]
            return list(rule.primal(*xs))

    # --- one run

    def _run(self, xs: Sequence[Tensor], then: Any = None) -> list[Tensor]:
        """f at xs: its outputs, or what `then(outs, leaves)` returns."""
        now, before = self.start.again(), [(x, x.detach().clone()) for x, _ in self.written]
        self.start.restore()
        _put(self.written)
        self.at, self.off, self.inside, self.function = 0, False, 0, 0
        try:
            with ExitStack() as stack:
                for context in (
                    set_here(program=self, own=0),
                    *map(Opened.unrecorded, self.opened),
                ):
                    stack.enter_context(context)
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
                pushed = upstream.forward_level() >= 0  # `detach` would drop tangents
                new = lambda x: x if pushed or x.requires_grad else x.detach().requires_grad_()
                moved, count = [new(x) for x in xs], len(xs) - len(self.captured)
                _put([*zip(self.captured, moved[count:], strict=True)])
                with self if self.watched else nullcontext():
                    outs = list(self.fun(*moved[:count])[0])
                return then(outs, [*moved[:count], *self.captured]) if then else outs
        finally:
            _put(before if self.recorded is not None else self.written)
            now.restore()

    def hold(self, y: Any, in_place: bool = False) -> Any:
        """A value that f stops: recorded in the first run, put back in the others."""
        is_tensor = isinstance(y, Tensor)
        if self.recorded is None:
            self.values.append(y.detach().clone() if is_tensor else y)
            self.stops.append(innermost(lines_above(1)))
            self.stopped |= {id(y): y} if is_tensor else {}
            return y
        k, self.at = self.at, self.at + 1
        old = self.recorded[k] if k < len(self.recorded) else y
        if getattr(old, "shape", None) != getattr(y, "shape", None):
            return y
        if in_place:
            _put([(y, old)])
        return y if in_place else old.clone() if is_tensor else old

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if here.own or self.inside:  # not f's own forward code
            return func(*args, **kwargs)
        if func is upstream.set_grad_enabled:
            if not torch.is_grad_enabled() and not self.off:  # in a Function, nothing is held
                self.function += args[0]
            elif self.function:
                self.function -= not args[0]
            else:
                self.off = not args[0]
            return func(*args, **kwargs)
        if func in _BACKWARD:
            self.inside += 1
            try:
                return func(*args, **kwargs)
            finally:
                self.inside -= 1
        writes = name in _WRITING or "out" in kwargs or name.endswith("_") > name.endswith("__")
        given = _tensors((args, kwargs))
        if self.recorded is None:
            self._watch(name, given, writes)
        y = func(*args, **kwargs)
        if torch.is_grad_enabled():
            if func in _STOPS and not self.function:
                return self.hold(y)
        elif self.off or torch.is_inference_mode_enabled():
            if type(y) in (tuple, list):
                return type(y)(map(self.hold, y))
            held = isinstance(y, Tensor) or name in _LEAVING
            return self.hold(y, any(y is a for a in args)) if held else y
        outs = _tensors(y)
        for t in outs if self.recorded is None else ():
            if t.requires_grad and t.dtype.is_floating_point:
                self.dtypes.add(t.dtype)
            elif any(id(a) in self.stopped for a in given):
                self.stopped[id(t)] = t
        if self.operations is not None and not writes and any(t.requires_grad for t in outs):
            label = (resolve_name(func) or name).removeprefix("torch.")
            self.called(label, *_flat(func, args, kwargs))
        return y

    def called(self, name: str, fn: Callable[..., Any], leaves: Sequence[Any]) -> None:
        """An operation or a custom rule is called."""
        moving = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        if self.operations is not None and any(moving):
            detached = [x.detach() if m else x for x, m in zip(leaves, moving, strict=True)]
            self.operations.append((name, innermost(lines_above(2)), fn, detached))

    def _watch(self, name: str, tensors: list[Tensor], writes: bool) -> None:
        """Keeps what is about to be written; notes Functions, hooks, and data that leave."""
        line = lambda: innermost(lines_above(3))
        for cls in [upstream.function_of(t.grad_fn) for t in tensors]:
            if cls is not None and not cls.__module__.startswith("gradtools."):
                text = f"the autograd.Function {cls.__name__} ({definition_of(cls.forward)})"
                text = "a backward hook of a module" if cls is upstream.ModuleHook else text
                self.suspects += [text] if text not in self.suspects else []
        if name.startswith("register_") and name.endswith("hook"):
            self.suspects.append(f"a hook ({line()})")
        if writes:
            known = {id(x) for x, _ in self.written}
            kept = [t for t in tensors if t.is_leaf and not t.requires_grad and id(t) not in known]
            self.written += [(t, t.detach().clone()) for t in kept]
        if name in _LEAVING and any(t.requires_grad for t in tensors):
            self.left.append(f"Data leaves PyTorch by {name.strip('_')}() ({line()}).")
        elif name in _LEAVING and any(id(t) in self.stopped for t in tensors):
            at = f"{name.strip('_')}() ({line()})"
            self.notes.append(f"stopped data leaves PyTorch by {at}, and counts as a constant")


@torch.no_grad()
def _put(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, value in values:
        x.data.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in upstream.tree_leaves(tree) if isinstance(x, Tensor)]


def _flat(func: Any, args: Any, kwargs: Any) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """A call as a function of those tensors that require gradients, and these."""
    found = [t for t in _tensors((args, kwargs)) if t.requires_grad]
    places = {id(t): k for k, t in enumerate(found)}

    def fn(*xs: Tensor) -> list[Tensor]:
        put = lambda x: xs[places[id(x)]] if id(x) in places else x
        return _tensors(func(*upstream.tree_map(put, args), **upstream.tree_map(put, kwargs)))

    return fn, found
