"""PyTorch's half of `gradtools.testing.checked`: runs f again, with what it stops held.

A `TorchFunctionMode` sees the operations of f. What f stops (`detach`, `.data`, the results of a
`no_grad` block) is recorded in the first run and put back in the others. Inside of an
autograd.Function gradients are off without a call that says so, so nothing is held there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from gradtools.code_origin import definition_of, innermost, lines_above
from gradtools.rules import captured_objects
from gradtools.testing.checked_mode import CheckedProgram, Streams, here, set_here
from gradtools.torch import _upstream as upstream
from gradtools.torch.module_arguments import Opened

Tensor = torch.Tensor
_DATA: Any = Tensor.data
_STOPS = {Tensor.detach, Tensor.detach_, _DATA.__get__}
_BACKWARD = {torch.autograd.grad, Tensor.backward, torch.autograd.backward}
_LEAVING = {"item", "tolist", "numpy", "__float__", "__int__", "__complex__", "__array__"}
_WRITING = {"batch_norm", "instance_norm", "__setitem__"}


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    upstream.tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, tree)
    return found


class Half(Streams):
    """What `checked` needs of PyTorch."""

    rehearses = False  # the operator's own run of f has values

    def scope(self, own: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> Any:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        on_devices = [torch.cuda.get_rng_state(i) for i in devices]
        return torch.get_rng_state(), on_devices, super().state()

    def restore(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        for i, of_device in enumerate(state[1]):
            torch.cuda.set_rng_state(of_device, i)
        super().restore(state[2])

    @torch.no_grad()
    def numbers(self, xs: Sequence[Any]) -> list[Any]:
        with set_here(own=1):
            wide = lambda x: torch.complex128 if x.is_complex() else torch.float64
            resolved = lambda x: x.resolve_conj().resolve_neg().numpy().copy()
            return [None if x is None else resolved(x.detach().to("cpu", wide(x))) for x in xs]

    def like(self, values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
        with set_here(own=1):
            pairs = zip(values, likes, strict=True)
            made = lambda v, x: torch.as_tensor(v).to(x.device, x.dtype)
            return [None if v is None else made(v, x) for v, x in pairs]

    def traced(self, xs: Sequence[Any]) -> bool:
        inside = torch.compiler.is_compiling() or upstream.peek_interpreter_stack() is not None
        return inside or any(isinstance(x, Tensor) and upstream.is_wrapped(x) for x in xs)

    @contextmanager
    def native(self, xs: Sequence[Any]) -> Iterator[Any]:
        """The values of xs, and which of them PyTorch may differentiate at; empty if none."""
        moving = [isinstance(x, Tensor) and x.requires_grad for x in xs]
        on = torch.is_grad_enabled() and not self.traced(xs)
        values = [x.detach() if m else x for x, m in zip(xs, moving, strict=True)]
        yield (values, moving) if on else ([], [])

    def program(self, fun: Any, leaves: Sequence[Tensor], captures: bool = False) -> Any:
        program = HeldProgram(fun, leaves, captures)
        return program if program.leaves else None

    def plain(self, fn: Callable[..., Any], xs: Sequence[Tensor]) -> HeldProgram:
        return HeldProgram(lambda *a: (fn(*a), []), xs, watched=False)


half = Half()


class HeldProgram(CheckedProgram, TorchFunctionMode):
    """f, which runs again at other points.

    Args:
        fun: f, as a backend takes it.
        leaves: Its arguments.
        captures: Whether tensors that f captures, and that require gradients, are leaves too.
        watched: Whether what f stops is held.
        edits: Whether gradtools' edits are made.
    """

    half = half

    def __init__(
        self,
        fun: Any,
        leaves: Sequence[Tensor],
        captures: bool = False,
        watched: bool = True,
        edits: bool = True,
    ) -> None:
        TorchFunctionMode.__init__(self)
        CheckedProgram.__init__(self, fun, leaves, edits)
        self.how, self.watched, self.start = (fun, leaves, captures, watched), watched, half.state()
        self.written: list[tuple[Tensor, Tensor]] = []  # what f writes in place, and its old value
        self.stopped = dict[int, Any]()  # stopped tensors by their ids
        self.captured: list[Tensor] = []
        self.eps = max([torch.finfo(x.dtype).eps for x in leaves], default=0.0)
        self.modules, self.opened = _within(fun)
        self.buffers = self._buffers_now()
        outs = self._run(leaves)
        if captures:
            self.captured = _ends(outs)
            self.leaves += [x.detach() for x in self.captured]
            self.eps = max([torch.finfo(x.dtype).eps for x in self.leaves], default=0.0)
        self.base, self.recorded = half.numbers(outs), self.values
        self.stopped.clear()

    # --- what `checked` calls

    def held(self, *xs: Tensor) -> list[Tensor]:
        return self._run(xs)

    def pullback(self, vs: Sequence[Any]) -> Callable[..., list[Tensor]]:
        """The pullback at fixed cotangents, as a function that can be differentiated."""

        def pulled(outs: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
            triples = zip(outs, half.like(vs, outs), strict=True)
            reached = [(y, v) for y, v in triples if v is not None and y.requires_grad]
            if not reached:
                return [torch.zeros_like(x) for x in moved]
            ys, seeds = zip(*reached, strict=True)
            options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
            return list(torch.autograd.grad(ys, moved, seeds, **options))

        return lambda *xs: self._run(xs, pulled)

    def without_edits(self) -> HeldProgram:
        return HeldProgram(*self.how, edits=False)

    def hold(self, x: Tensor) -> Any:
        with set_here(own=1):
            x = x.detach()
        return self._held(x)

    def called(self, name: str, fn: Callable[..., Any], leaves: Sequence[Any]) -> None:
        moving = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        if self.operations is not None and any(moving):
            detached = [x.detach() if m else x for x, m in zip(leaves, moving, strict=True)]
            self.operations.append((name, innermost(lines_above(2)), fn, detached))

    # --- one run

    def _put(self, values: Sequence[tuple[Tensor, Tensor]]) -> None:
        with set_here(own=1), torch.no_grad():
            for x, value in values:
                x.data.copy_(value)

    def _buffers_now(self) -> list[dict[str, Any]]:
        return [dict(m.named_buffers(recurse=False)) for m in self.modules]

    def _bind(self, buffers: Sequence[dict[str, Any]]) -> None:
        for module, own in zip(self.modules, buffers, strict=True):
            for name, x in own.items():
                setattr(module, name, x)

    def _run(self, xs: Sequence[Tensor], then: Any = None) -> list[Tensor]:
        """f at xs: its outputs, or what `then(outs, leaves)` returns."""
        with set_here(own=1):
            before = [(x, x.detach().clone()) for x in [*self.captured, *dict(self.written)]]
        buffers = self._buffers_now()
        self._bind(self.buffers)
        self._put(self.written)
        half.restore(self.start)
        self.at, self.off, self.inside, self.function = 0, False, 0, 0
        normal = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        try:
            with ExitStack() as stack:
                for context in (set_here(program=self, own=0), normal, torch.enable_grad()):
                    stack.enter_context(context)
                for opened in self.opened:
                    stack.enter_context(opened.unrecorded())
                pushed = upstream.forward_level() >= 0  # `detach` would drop tangents
                new = lambda x: x if x.requires_grad else x.detach().requires_grad_()
                new = (lambda x: x) if pushed else new
                moved = [new(x) for x in xs]
                count = len(xs) - len(self.captured)
                self._put([*zip(self.captured, moved[count:], strict=self.recorded is not None)])
                with self if self.watched else nullcontext():
                    outs = list(self.fun(*moved[:count])[0])
                return then(outs, [*moved[:count], *self.captured]) if then else outs
        finally:
            self._bind(buffers)
            self._put(before if self.recorded is not None else [*self.written, *before])

    def _held(self, y: Any, in_place: bool = False) -> Any:
        """A value that f stopped: recorded, or that of the first run."""
        if self.recorded is None:
            self.values.append(y.detach().clone() if isinstance(y, Tensor) else y)
            if isinstance(y, Tensor):
                self.stopped[id(y)] = y
            return y
        k, self.at = self.at, self.at + 1
        old = self.recorded[k] if k < len(self.recorded) else y
        if not isinstance(y, Tensor):
            return old
        if not isinstance(old, Tensor) or old.shape != y.shape:
            return y
        if in_place:
            self._put([(y, old)])
        return y if in_place else old.clone()

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
        if self.recorded is None:
            self._watch(name, _tensors((args, kwargs)), writes)
        y = func(*args, **kwargs)
        if torch.is_grad_enabled():
            if func in _STOPS and not self.function:
                return self._held(y)
        elif self.off or torch.is_inference_mode_enabled():
            if isinstance(y, tuple | list):
                return type(y)(map(self._held, y)) if type(y) in (tuple, list) else y
            held = isinstance(y, Tensor) or name in _LEAVING
            return self._held(y, any(y is a for a in args)) if held else y
        outs = _tensors(y)
        for t in outs if self.recorded is None else ():
            if t.requires_grad and t.dtype.is_floating_point:
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)
            elif any(id(a) in self.stopped for a in _tensors(args)):
                self.stopped[id(t)] = t
        if self.operations is not None and not writes and any(t.requires_grad for t in outs):
            label = (resolve_name(func) or name).removeprefix("torch.")
            self.called(label, *_flat(func, args, kwargs))
        return y

    def _watch(self, name: str, tensors: list[Tensor], writes: bool) -> None:
        """Keeps what is about to be written; notes Functions, hooks, and data that leave."""
        line = lambda: innermost(lines_above(3))
        for t in tensors:
            cls = upstream.function_of(t.grad_fn)
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


def _within(fun: Any) -> tuple[list[Any], list[Any]]:
    """The modules that f is, closes over or reads as globals, and the `Opened` calls around f."""
    f, opened = getattr(fun, "call", fun), list[Any]()
    while (inner := getattr(f, "f", None)) is not None:
        f = inner
        opened += [f] if isinstance(f, Opened) else []
    code, names = getattr(f, "__code__", None), getattr(f, "__globals__", {})
    read = [names[n] for n in code.co_names if n in names] if code else []
    is_module = lambda x: isinstance(x, torch.nn.Module)
    found = [*filter(is_module, read), *captured_objects([f], is_module, Tensor)]
    return [m for x in found for m in x.modules()], opened


def _ends(outs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a graph ends at and that are no aliases made for it."""
    todo = [y.grad_fn for y in outs if y.grad_fn is not None]
    found, seen = dict[int, Tensor](), set[Any]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if (x := getattr(node, "variable", None)) is not None:
                found[id(x)] = x
            todo += [n for n, _ in node.next_functions if n is not None]
    return list(found.values())


def _flat(func: Any, args: Any, kwargs: Any) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """A call as a function of those tensors that require gradients, and these."""
    found = [t for t in _tensors((args, kwargs)) if t.requires_grad]
    places = {id(t): k for k, t in enumerate(found)}

    def fn(*xs: Tensor) -> list[Tensor]:
        put = lambda x: xs[places[id(x)]] if id(x) in places else x
        return _tensors(func(*upstream.tree_map(put, args), **upstream.tree_map(put, kwargs)))

    return fn, found
