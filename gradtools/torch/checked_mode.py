"""Implements `gradtools.testing.checked` in PyTorch: runs f again with fixed detached values.

A `TorchFunctionMode` intercepts the operations of f. Values that f detaches (by `detach`, `.data`
or a `no_grad` block) are recorded in the first run and restored in later runs. Values that a
`torch.autograd.Function` computes are not fixed, because the mode does not intercept the call that
disables gradients inside of a Function.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from gradtools.code_origin import definition_of, innermost, lines_above
from gradtools.testing.checked_mode import (
    CheckedProgram,
    functions_within,
    here,
    set_here,
)
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.functorch_wrappers import is_dual
from gradtools.torch.module_arguments import Opened
from gradtools.torch.state import Held, Randomness, RunState, restored

Tensor = torch.Tensor
_DATA: Any = Tensor.data
_STOPS = {Tensor.detach, Tensor.detach_, _DATA.__get__}
_redispatch = getattr(torch.overrides, "redispatch_function", None)  # from PyTorch 2.13 on
_BACKWARD = {torch.autograd.grad, Tensor.backward, torch.autograd.backward}
_LEAVING = {"item", "tolist", "numpy", "__float__", "__int__", "__complex__", "__array__"}


def scope(own: bool) -> AbstractContextManager[None]:
    return nullcontext()


def unchanged() -> AbstractContextManager[None]:
    """Returns a context manager that restores the random state on exit."""
    return restored(Randomness.everywhere({"cuda"} if torch.cuda.is_initialized() else ()))


def like(values: Sequence[Any], likes: Sequence[Tensor]) -> list[Tensor]:
    """Converts NumPy arrays to tensors with the dtypes and devices of `likes`."""
    pairs = zip(values, likes, strict=True)
    return [torch.as_tensor(v).to(x.device, x.dtype) for v, x in pairs]


def traced(xs: Sequence[Any]) -> bool:
    inside = torch.compiler.is_compiling() or upstream.peek_interpreter_stack() is not None
    return inside or any(isinstance(x, Tensor) and upstream.is_wrapped(x) for x in xs)


@contextmanager
def native(xs: Sequence[Any]) -> Iterator[Any]:
    """Yields the detached xs and their requires_grad flags, or two empty lists.

    The lists are empty if grad mode is off or a transform traces xs.
    """
    moving = [isinstance(x, Tensor) and x.requires_grad for x in xs]
    values = [x.detach() if m else x for x, m in zip(xs, moving, strict=True)]
    yield (values, moving) if torch.is_grad_enabled() and not traced(xs) else ([], [])


class HeldProgram(CheckedProgram, TorchFunctionMode):
    """Runs f again at other points, with the values that f detached in the first run."""

    half = sys.modules[__name__]
    within = False  # whether `gumbel_softmax` is running

    def __init__(self, backend: Any, member: str, fun: Any, leaves: Any, captures: bool) -> None:
        TorchFunctionMode.__init__(self)
        CheckedProgram.__init__(self, backend, member, fun, leaves)
        within = functions_within(fun)
        self.opened = [f for f in within if isinstance(f, Opened)]
        roots = [within[-1], *(m for f in self.opened for m in f.opened_modules)]
        own = frozenset().union(*(f.own for f in self.opened))
        self.hooked = [upstream.tensor_hooks(x) if id(x) in own else None for x in leaves]
        for hook in [h for hooks in self.hooked for h in (hooks or {}).values()]:
            self.hooks[f"A parameter has a hook ({definition_of(hook)})."] = None
        self.start = RunState.now(Held(roots, {x.device.type for x in leaves}))
        self.known = dict[int, Tensor]()
        self.stopped = dict[int, tuple[Tensor, frozenset[int]]]()  # tensors and indices of `values`
        self.in_rules = frozenset[int]()  # indices of `values` that a custom rule or a hook uses
        self.captured = list[Tensor]()
        self._measure(leaves)
        with self.at(self.numbers(leaves)) as xs:
            outs = self.run(*xs)
        if captures:  # captured tensors that require grad become additional leaves
            self.captured = list(dict.fromkeys(x for x in leaves_of(outs) if id(x) not in self.new))
            self.leaves += [x.detach() for x in self.captured]
            self._measure(self.captured)
        self.recorded = self.values

    def _measure(self, xs: Sequence[Tensor]) -> None:
        """Updates `eps` to the largest machine epsilon of the tensors' dtypes."""
        for dtype in {x.dtype for x in xs if x.dtype.is_floating_point or x.dtype.is_complex}:
            self.eps = max(self.eps, torch.finfo(dtype).eps)

    @contextmanager
    def at(self, points: Sequence[Any]) -> Iterator[list[Tensor]]:
        now, before = self.start.again(), [x.detach().clone() for x in self.captured]
        xs = like(points, self.leaves)
        _put(self.captured, xs[len(xs) - len(before) :])
        try:
            with ExitStack() as stack:
                for context in (set_here(program=self, own=False), torch.inference_mode(False)):
                    stack.enter_context(context)
                for f in self.opened:
                    stack.enter_context(f.unrecorded())
                stack.enter_context(torch.enable_grad())
                yield xs
        finally:
            _put(self.captured, before)
            now.restore()

    def run(self, *xs: Tensor) -> list[Tensor]:
        self.start.restore()
        self.off = self.function = False
        pushed = upstream.forward_level() >= 0  # `detach` would drop tangents
        new = lambda x: x if pushed or x.requires_grad else x.detach().requires_grad_()
        given = [new(x) for x in xs[: len(xs) - len(self.captured)]]
        given = [_with_hooks(x, hooks) for x, hooks in zip(given, self.hooked, strict=True)]
        self.new, self.known = {id(x) for x in given}, {}
        with self:
            outs = list(self.fun(*given)[0])
        self._see_arguments("f's output", outs)
        return outs

    def pull(self, run: Any, xs: list[Tensor], vs: Sequence[Any]) -> list[Tensor]:
        if not self.captured:
            return super().pull(run, xs, vs)
        ends = [x.detach().requires_grad_() for x in xs[: len(xs) - len(self.captured)]]
        ends += self.captured
        outs = self.held(*ends)
        reached = [(y, v) for y, v in zip(outs, like(vs, outs), strict=True) if y.requires_grad]
        ys, seeds = zip(*reached, strict=True)
        options = {"allow_unused": True, "materialize_grads": True}
        return list(torch.autograd.grad(ys, ends, seeds, **options))

    def edit(self, rule: Any, xs: Sequence[Tensor]) -> list[Tensor]:
        """Evaluates an edit with operations that PyTorch differentiates, without its rule."""
        with set_here(own=True):
            if rule.name == "straight_through":
                return [xs[1] + self.hold((xs[0] - xs[1]).detach())]
            return list(rule.primal(*xs))

    # --- the operations of f

    def given_to_rule(self, xs: Sequence[Any]) -> None:
        if self.recorded is None:
            self._recompute_later(self._stops_of(xs))

    def _recompute_later(self, stops: Iterable[int]) -> None:
        self.in_rules |= frozenset(stops)
        self.stops_reach_rules = bool(self.in_rules)

    def _stops_of(self, xs: Sequence[Any]) -> frozenset[int]:
        """Returns the indices of the stopped values from which xs are computed."""
        found = [self.stopped[id(x)][1] for x in xs if id(x) in self.stopped]
        return frozenset().union(*found)

    def hold(self, y: Any, given: Sequence[Any] = (), in_place: bool = False) -> Any:
        """Returns y in the first run, and the recorded y of the first run in later runs."""
        is_tensor = isinstance(y, Tensor)
        if self.recorded is None:
            stops = self._stops_of(given) | {len(self.values)}
            self.values.append(y.detach().clone() if is_tensor else y)
            self.stopped |= {id(y): (y, stops)} if is_tensor else {}
            return y
        k, self.place = self.place, self.place + 1
        constant = k < len(self.recorded) and not (self.recompute and k in self.in_rules)
        old = self.recorded[k] if constant else y
        if getattr(old, "shape", None) != getattr(y, "shape", None):
            return y
        if in_place:
            _put([y], [old])
        return y if in_place else old.clone() if is_tensor else old

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if here.own or func in _BACKWARD:  # func computes a derivative, or gradtools calls func
            of_user = not here.own and torch.is_grad_enabled()
            if of_user and self.count is not None and len(args) < 4:
                kwargs["retain_graph"] = True  # `seen` contains values of this graph
            with set_here(own=True):
                y = func(*args, **kwargs)
            if of_user and func is torch.autograd.grad and not any(map(_is_moving, _tensors(y))):
                self._lose("torch.autograd.grad without create_graph=True")
            return y
        if func is upstream.set_grad_enabled:
            if self.function or not (self.off or torch.is_grad_enabled()):
                self.function = args[0]  # f calls an autograd.Function
            else:
                self.off = not args[0]
            return func(*args, **kwargs)
        if func is torch.nn.functional.gumbel_softmax and _redispatch and not self.within:
            self.within = True  # the function detaches, and calls this mode again
            try:
                with self:
                    return _redispatch(func, types, args, kwargs)
            finally:
                self.within = False
        given = _tensors((args, kwargs))
        if torch.is_grad_enabled() and not self.function:
            self._see_arguments(f"an argument of {name}", given)
        y = func(*args, **kwargs)
        if torch.is_grad_enabled():
            if func in _STOPS and not self.function:
                return self.hold(y, given)
        elif self.off or torch.is_inference_mode_enabled():
            if type(y) in (tuple, list):
                return type(y)(self.hold(part, given) for part in y)
            held = isinstance(y, Tensor) or name in _LEAVING
            return self.hold(y, given, any(y is a for a in args)) if held else y
        outs = _tensors(y)
        if self.recorded is None:
            self._measure([t for t in outs if t.requires_grad])
            if name.endswith("hook"):  # a hook may use any earlier value
                self._recompute_later(range(len(self.values)))
            if stops := self._stops_of(given):
                if not torch.is_grad_enabled():  # f calls an autograd.Function
                    self.given_to_rule(given)
                self.stopped |= {id(t): (t, stops) for t in outs if not t.requires_grad}
                if name in _LEAVING:
                    at = f"{name.strip('_')}() ({innermost(lines_above(1))})"
                    text = f"a stopped value leaves PyTorch via {at}; it is treated as a constant"
                    self.notes.append(text)
        if torch.is_grad_enabled() and not self.function:
            if name in _LEAVING and any(map(_is_moving, given)):
                self._lose(f"the value that leaves PyTorch via {name.strip('_')}()")
            else:
                name = (resolve_name(func) or name).removeprefix("torch.")
                self.see(name, innermost(lines_above(1)), outs)
        return y

    def _lose(self, name: str) -> None:
        """Records the current operation in `lost`."""
        if self.count is not None:
            self.lost.setdefault(f"{name} ({innermost(lines_above(2))})", len(self.seen))

    def see(self, name: str, line: Any, ys: Sequence[Any]) -> None:
        if self.count is None:
            return
        ys = [y for y in ys if isinstance(y, Tensor) and id(y) not in self.known]
        self.known |= {id(y): y for y in ys}
        ys = [y for y in ys if _is_moving(y) and not upstream.is_wrapped(y)]
        with set_here(own=True):
            super().see(name, line, [y.clone() for y in ys])

    def _see_arguments(self, name: str, given: Sequence[Tensor]) -> None:
        """Records arguments that no intercepted call returned, such as results of a Function."""
        if self.count is None:
            return
        line = innermost(lines_above(1))
        if name.endswith("hook"):
            self.hooks[f"f registers a hook ({line})."] = None
        for t in given:
            cls, text = upstream.function_of(t.grad_fn), name
            if cls is upstream.ModuleHook:
                text = "a backward hook of a module"
            elif cls is not None and not cls.__module__.startswith("gradtools."):
                text = f"the autograd.Function {cls.__name__} ({definition_of(cls.forward)})"
            self.see(text, line, [t])


def _is_moving(x: Tensor) -> bool:
    """Returns whether autograd differentiates x."""
    return x.requires_grad or is_dual(x)


def _with_hooks(x: Tensor, hooks: Any) -> Tensor:
    """Returns a view of x on which the given hooks are registered, or x if there are no hooks."""
    y = x.view_as(x) if hooks else x
    for hook in (hooks or {}).values():
        y.register_hook(hook)
    return y


@torch.no_grad()
def _put(xs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for x, value in zip(xs, values, strict=True):
        x.data.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in upstream.tree_leaves(tree) if isinstance(x, Tensor)]
