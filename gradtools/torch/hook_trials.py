"""Trials of gradient hooks: derivatives that a hook silently loses are refused.

A hook may replace a cotangent by the result of a solve without a graph, as a deep equilibrium model
does: the gradient is right then, but its derivative lacks a term, without an error. So if the
gradient is to be differentiated, f is rerun (its side effects are undone), and the hooks that f or
its modules register on tensors and nodes are tested: with h(x, ct) the hook's result at f's inputs
x, autograd's derivative of h is compared with central differences, in x and in ct.

Reverse over reverse mode applies a hook twice (as it does `scale_gradient`), forward over reverse
mode once: there a hook that edits the gradient is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import OWN, all_behind, graph_of, surveyed
from gradtools.torch.functorch_wrappers import is_dual, is_inexact, is_pushed
from gradtools.torch.open_derivatives import is_spent, tracked_in
from gradtools.torch.operation_marks import OWN_HOOKS, only_observes
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.replaying.recomputing import mark, marked
from gradtools.torch.rerunning import program_of, put_back
from gradtools.torch.rules.checking import value_of
from gradtools.torch.state import Snapshot
from gradtools.torch.trials import (
    Suspect,
    Untestable,
    differ,
    is_tracked,
    on_one_line,
    paired,
    slope,
    wave,
)

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped


def gated_at_hooks(
    caller: str,
    fun: Fun,
    leaves: Sequence[Tensor],
    aliases: Sequence[Tensor],
    outs: Sequence[Any],
    cts: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    linear: bool = False,
) -> list[Tensor | None]:
    """The gradient of `outs = fun(*leaves)`, with gates for derivatives that its hooks lose.

    aliases: The leaves' aliases in the graph of outs.
    linear: Whether hooks must be linear maps.
    """
    pairs = [(y, ct) for y, ct in zip(outs, cts, strict=True) if ct is not None and y.requires_grad]
    outs, seeds = [y for y, _ in pairs], [ct for _, ct in pairs]
    captured = [x for x in surveyed(outs).leaves if not is_spent(x)]
    inputs = tracked_in([y.grad_fn for y in outs], aliases)
    behind = [ct for ct in cts if ct is not None and ct.requires_grad]
    pushed = None
    if any(g is not None and is_dual(g) for g in grads):
        pushed = [forward_ad.unpack_dual(ct).primal for ct in seeds]
    hooks = Hooks(caller, fun, leaves, captured, linear, pushed)
    return list(hooks.gated(grads, behind, inputs, pushed is not None))


def gated_in_functorch(
    caller: str,
    fun: Fun,
    leaves: Sequence[Tensor],
    ends: Sequence[Tensor],
    cts: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Any]:
    """`gated_at_hooks` for a gradient by torch.func, whose graph hides the levels around it.

    ends: The leaves of the graph of the outputs.
    """
    held = [x for x, _ in Snapshot.of([fun], leaves).reached.watched]
    known = {
        id(x): x for x in (*held, *ends) if is_wrapped(x) or (is_tracked(x) and not is_spent(x))
    }
    captured = [x for x in known.values() if not any(x is leaf for leaf in leaves)]
    hooks = Hooks(caller, fun, [*map(value_of, leaves)], captured, False, [])
    inputs = [x for x in (*leaves, *captured) if is_tracked(x)]
    return list(hooks.gated(grads, [*filter(is_tracked, cts)], inputs, is_pushed()))


class Hooks(Suspect):
    """The hooks that f sets on gradients.

    Args:
        caller: The operator's name.
        fun: The function f.
        leaves: Its arguments.
        captured: The tensors that it captures.
        linear: Whether hooks must be linear maps.
        pushed: The cotangents, if the gradient is pushed forward.
    """

    def __init__(
        self, caller: str, fun: Fun, leaves: Any, captured: Any, linear: bool, pushed: Any
    ) -> None:
        self.caller = caller
        self._trial = lambda: _Trial(fun, leaves, captured).lost(linear, pushed)
        self._lost: set[str] | None = None

    def lost(self, forward: bool) -> set[str]:
        if self._lost is None:
            try:
                with upstream.temporarily_clear_interpreter_stack():
                    self._lost = self._trial()
            except Exception as error:
                raise Untestable(on_one_line(error)) from error
        return self._lost

    def says(self, which: str, lost: set[str] | Untestable) -> str | None:
        if isinstance(lost, Untestable):
            return (
                "f sets a hook on a gradient, and the gradient is to be differentiated. "
                "What the hook makes of it may silently lose its derivative, so it is tried once, "
                f"by finite differences, and this one could not be: {lost}. Use "
                "gt.transform_gradient, or a gt.custom_rule."
            )
        along = [words for kind, words in _ALONG.items() if kind in lost]
        if which in lost or (along and which == "inputs"):  # cotangents may depend on inputs
            return (
                "f sets a hook on a gradient whose result autograd cannot differentiate "
                f"with respect to {' or '.join(along)} (it solves or computes under no_grad, or by "
                "torch.autograd.grad without create_graph=True), so that a second derivative is "
                "lost. Write the hook of PyTorch's operations, or use gt.custom_rule."
            )
        found = [text.format(self.caller) for kind, text in _TEXTS.items() if kind in lost]
        return f"f sets a hook on a gradient {found[0]}" if found else None


_TEXTS = {
    "nonlinear": (
        "that is not linear in it (clipping, normalizing), and a derivative of the gradient is "
        "asked for, where {} takes the pullback for linear. Take vjp or grad, or set the hook "
        "outside of what is computed again."
    ),
    "edits": (
        "that edits it, and the gradient is differentiated in forward mode or by torch.func (in "
        "vmap), where the hook is not applied again, as it is in reverse mode. Take grad of grad "
        "or hvp(mode='reverse_over_reverse'), outside of vmap, or gt.scale_gradient."
    ),
}
_ALONG = {"cotangents": "what comes in", "inputs": "f's inputs or parameters"}


# --- recording hooks -----------------------------------------------------------------------


class _Hook(NamedTuple):
    """A recorded hook.

    Attributes:
        order: Its number in the order of registration.
        node: Its node in autograd's graph.
        xs: The shapes, dtypes and devices of its cotangents; None without one.
        call: Calls the hook with cotangents.
        edits: Whether it returned a different gradient when it ran; empty if it did not run.
    """

    order: int
    node: Any
    xs: Sequence[Any]
    call: Callable[[Sequence[Tensor | None]], Any]
    edits: list[bool]

    @classmethod
    def of_node(cls, order: int, node: Any, hook: Callable[..., Any], is_before: bool) -> _Hook:
        outs = upstream.described(node)
        if is_before:
            return cls(order, node, outs, lambda cts: hook(tuple(cts)), [])
        ins = [p and upstream.described(p)[i] for p, i in node.next_functions]
        count = len(ins)

        def call(cts: Sequence[Tensor | None]) -> Any:  # the cotangents of outs stay as they are
            new = hook(tuple(cts[:count]), tuple(cts[count:]))
            if new is None:
                return None
            return (*((new,) if isinstance(new, Tensor) else new), *cts[count:])

        return cls(order, node, [*ins, *outs], call, [])

    def noting(self, hook: Any) -> Any:
        """Wraps the hook: records in `edits` whether it changes the gradient."""

        def noted(given: Any, *others: Any) -> Any:
            out = hook(given, *others)
            if out is not None:
                pairs = zip(upstream.tree_leaves(out), upstream.tree_leaves(given), strict=False)
                tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and a is not b]
                self.edits[:] = [self.edits == [True] or not all(torch.equal(*p) for p in tensors)]
            return out

        return noted

    def cotangents(self) -> list[Tensor | None]:
        make = lambda x: torch.ones(tuple(x.shape), dtype=x.dtype, device=x.device)
        return [None if x is None else wave(make(x), 2.0) for x in self.xs]

    def number(self, cts: Sequence[Tensor | None]) -> Tensor:
        """Re<w, h(ct)>."""
        outs = self.call(cts)
        outs = cts if outs is None else (outs,) if isinstance(outs, Tensor) else outs
        ys = [ct if y is None else y for y, ct in zip(outs, cts, strict=True)]
        return paired(ys)


def _set_on_nodes(outs: Sequence[Any], first: int) -> list[_Hook]:
    """Records the hooks on the nodes of a graph that were registered from number `first` on."""
    result = []
    for node in graph_of([y for y in outs if isinstance(y, Tensor)]):
        for is_before in () if isinstance(node, upstream.AccumulateGrad) else (False, True):
            handle = (node.register_prehook if is_before else node.register_hook)(print)
            handle.remove()
            OWN_HOOKS[0] += 1
            hooks = handle.hooks_dict_ref()  # all hooks of the node
            for number, hook in [*hooks.items()]:
                if number >= first and _is_users(hook):
                    result.append(_Hook.of_node(number, node, hook, is_before))
                    hooks[number] = result[-1].noting(hook)
    return result


def _is_users(hook: Any) -> bool:
    """Whether a hook is tested: not in a program that is recomputed, which tests its own hooks."""
    own = getattr(hook, "__module__", "").startswith(OWN[0])
    return not (mark() or own or only_observes(hook))


class _Hooks(TorchFunctionMode):
    """A function mode that records hooks on tensors, and replaces captured tensors by copies.

    A captured parameter itself must not be perturbed: another thread may use it.
    """

    def __init__(self, xs: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__()
        self.recorded: list[_Hook] = []
        self._copies = {id(x): y for x, y in zip(xs, copies, strict=True)}

    def _within(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(self._within, x)) if type(x) in (list, tuple) else x
        return self._copies.get(id(x), x)

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = self._within(tuple(args))
        kwargs = {k: self._within(x) for k, x in (kwargs or {}).items()}
        if fun is torch.Tensor.register_hook:
            x, hook = args if len(args) > 1 else (*args, kwargs["hook"])
            if _is_users(hook):
                call = lambda cts, hook=hook: hook(cts[0])
                self.recorded.append(_Hook(upstream.hooks_made(), x.grad_fn, [x], call, []))
                hook = self.recorded[-1].noting(hook)
            return fun(x, hook)
        return fun(*args, **kwargs)


_SCALES = (-0.5, 1e4, -1e4)  # a hook may clamp one sign

# --- the trial -----------------------------------------------------------------------------


class _Trial:
    """The hooks of f as a map of its inputs, of its captured leaves, and of cotangents."""

    def __init__(self, fun: Fun, leaves: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        self.captured = captured
        with upstream.DisableTorchFunction():  # a trial around this one sees no cut here
            self.xs = [x.detach().clone() for x in leaves]
        self.randomness = Randomness.now([*self.xs, *captured])
        self.run = program_of(fun)

    def lost(self, linear: bool, pushed: Sequence[Tensor] | None) -> set[str]:
        """What hooks lose: "inputs" and "cotangents", the derivative of the gradient along these.

        Also "nonlinear" if a hook is not linear, and "edits" if forward mode would skip one.

        pushed: The cotangents, if the gradient is pushed forward.
        """
        found = set[str]()
        with restored(self.randomness), torch.inference_mode(False), torch.enable_grad():
            with self.hooks() as (xs, hooks, outs):
                cts = [hook.cotangents() for hook in hooks]
                if pushed is not None and hooks:
                    # Is a hook that edits the gradient on the path of the gradient's derivative?
                    outs = [y for y in outs if isinstance(y, Tensor) and y.requires_grad]
                    if [(y.shape, y.dtype) for y in outs] != [
                        (ct.shape, ct.dtype) for ct in pushed
                    ]:
                        pushed = [torch.ones_like(y) for y in outs]
                    moving = [x for x in xs[: len(self.xs)] if x.requires_grad]
                    grads = torch.autograd.grad(
                        outs, moving, pushed, create_graph=True, allow_unused=True
                    )
                    behind = all_behind([g.grad_fn for g in grads if g is not None])
                    if any(hook.edits == [True] and hook.node in behind for hook in hooks):
                        found.add("edits")
            if hooks and linear and not self._are_linear(cts):
                found.add("nonlinear")
            return found | {along for along in _ALONG if hooks and self._differs(cts, along)}

    def _differs(self, cts: Sequence[Any], along: str) -> bool:
        """Whether autograd's derivative of a hook along these differs from central differences."""

        def at(step: float, derivative: bool = False) -> list[float]:
            """Re<w, h> of each hook, moved by a step, or its derivative there."""
            with self.hooks(step if along == "inputs" else 0.0) as (xs, hooks, _):
                moved = cts
                if along == "cotangents":
                    move = lambda ct: (ct + step * wave(ct, 1.5)).requires_grad_()
                    moved = [[None if ct is None else move(ct) for ct in one] for one in cts]
                    xs = [ct for one in moved for ct in one if ct is not None]
                totals = _numbers(hooks, moved)
                if not derivative:
                    return [float(y.detach()) for y in totals]
                moving = [x for x in xs if x.requires_grad]
                return [slope(y, moving, [wave(x, 1.5) for x in moving]) for y in totals]

        eps = [torch.finfo(x.dtype).eps for x in self.xs if is_inexact(x)]
        eps = max(eps, default=torch.finfo(torch.get_default_dtype()).eps)
        return differ(at, at(0.0, True), eps)

    def _are_linear(self, cts: Sequence[Any]) -> bool:
        with self.hooks() as (_, hooks, _):
            known, *others = [_numbers(hooks, cts, s) for s in (1.0, *_SCALES)]
        for s, ys in zip(_SCALES, others, strict=True):
            for y, one in zip(ys, known, strict=True):
                # A result that is not finite, as in half precision, is undecided.
                slack = torch.finfo(one.dtype).eps ** 0.5
                if y.isfinite() and not abs(y / s - one) <= slack * abs(one):
                    return False
        return True

    @contextmanager
    def hooks(self, step: float = 0.0) -> Iterator[tuple[list[Tensor], list[_Hook], Any]]:
        """Runs f at inputs and captured leaves moved by a step: these, its hooks and outputs."""
        xs = [x + step * wave(x, 1.5) if is_inexact(x) else x for x in self.xs]
        xs = [x.detach().requires_grad_(is_inexact(x)) for x in xs]
        values = [value_of(x) for x in self.captured]
        copies = [x + step * wave(x, 1.5) if is_inexact(x) else x for x in values]
        copies = [x.detach().requires_grad_(is_inexact(x)) for x in copies]
        if self.randomness is not None:
            self.randomness.restore()
        mode, first = _Hooks(self.captured, copies), upstream.hooks_made()
        with put_back(self.run, self.xs), marked(""), mode:  # hooks set inside are the user's
            outs = self.run([x.view_as(x) for x in xs])
            hooks = sorted([*mode.recorded, *_set_on_nodes(outs, first)], key=attrgetter("order"))
            yield [*xs, *copies], hooks, outs


def _numbers(hooks: Sequence[_Hook], cts: Sequence[Any], scale: float = 1.0) -> list[Tensor]:
    """Re<w, h(ct)> of each hook, in the order of a backward pass: hooks may share state."""
    pairs = zip(reversed(hooks), reversed(cts), strict=True)
    scaled = lambda ct: ct if ct is None or scale == 1.0 else scale * ct
    return [hook.number([*map(scaled, ct)]) for hook, ct in pairs]
