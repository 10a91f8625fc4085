"""Defines the PyTorch functions that cost.py measures: gradtools operators and equivalent code.

The functions of a case compute the same results. The first function uses gradtools, and the second
is hand-written.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import gradtools.torch as gt

Ways = dict[str, Callable[[], Any]]
OURS, HAND = "gradtools", "by hand"
CHUNKS = 4


def cases(rows: int, width: int) -> dict[str, Ways]:
    """Returns the functions for each operator; packages that are missing are left out."""
    at = Point(rows, width)
    made = {}
    for part in (_first_order, _second_order, _edits, _rules, _memory, _accumulation):
        made |= part(at)
    return made


class Point:
    """The arrays of all cases, and functions of these arrays."""

    def __init__(self, rows: int, width: int) -> None:
        generator, here = torch.Generator().manual_seed(0), torch.get_default_device()
        draw = lambda *n: torch.randn(n, generator=generator, device="cpu").to(here)
        self.x, self.t = draw(2, rows, width)
        self.w, self.v = draw(2, width, width) / width**0.5
        self.small = draw(width)
        self.chunk = rows // CHUNKS

    def layer(self, w: Any, x: Any) -> Any:
        """Applies a linear layer and an activation."""
        return torch.tanh(x @ w)

    def loss(self, w: Any, x: Any) -> Any:
        """Returns the sum of the losses of the rows."""
        return (self.layer(w, x) ** 2).sum()

    def of_w(self, edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the loss as a function of w, with a gradient edit after the layer."""
        return lambda w: (edit(self.layer(w, self.x)) ** 2).sum()


def graded(f: Callable[..., Any], *xs: Any, create: bool = False) -> Any:
    """Returns the value of f, the gradients, and the aliases of xs that require grad."""
    aliases = [x.detach().requires_grad_() for x in xs]
    out = f(*aliases)
    return out, torch.autograd.grad(out, aliases, create_graph=create), aliases


def gradient(f: Callable[[Any], Any], x: Any) -> Any:
    return graded(f, x)[1][0]


def _first_order(at: Point) -> dict[str, Ways]:
    w, x, v, t = at.w, at.x, at.v, at.t
    of_x = lambda x: at.layer(w, x)

    def pulled() -> Any:
        alias = x.detach().requires_grad_()
        return torch.autograd.grad(of_x(alias), alias, t)

    def rows_of(push: bool) -> Any:
        rows = lambda x: torch.tanh(x @ w)
        return (torch.func.jacfwd if push else torch.func.jacrev)(rows)(at.small)

    def each() -> Any:
        one = lambda w, x: at.loss(w, x)
        return torch.func.vmap(torch.func.grad(one), (None, 0))(w, x)

    def one_by_one() -> Any:
        return torch.stack([gradient(lambda w, row=row: at.loss(w, row), w) for row in x])

    def game() -> Any:
        value, (a, b), _ = graded(at.loss, w, x)
        return value, (a, -b)

    made: dict[str, Ways] = {
        "grad": {
            OURS: lambda: gt.grad(at.loss)(w, x),
            HAND: lambda: gradient(lambda w: at.loss(w, x), w),
            "torch.func.grad": lambda: torch.func.grad(at.loss)(w, x),
        },
        "value_and_grad": {
            OURS: lambda: gt.value_and_grad(at.loss, (0, 1))(w, x),
            HAND: lambda: graded(at.loss, w, x)[:2],
            "torch.func": lambda: torch.func.grad_and_value(at.loss, (0, 1))(w, x),
        },
        "vjp": {
            OURS: lambda: gt.vjp(of_x, x)[1](t),
            HAND: pulled,
            "torch.func": lambda: torch.func.vjp(of_x, x)[1](t),
        },
        "jvp": {
            OURS: lambda: gt.jvp(of_x, (x,), (t,)),
            HAND: lambda: by_duals(of_x, x, t),
            "torch.func": lambda: torch.func.jvp(of_x, (x,), (t,)),
        },
        "linearize": {
            OURS: lambda: gt.linearize(of_x, x)[1](t),
            HAND: lambda: by_transposing(of_x, x, t),
            "torch.func": lambda: torch.func.linearize(of_x, x)[1](t),
        },
        "jacobian, reverse": {
            OURS: lambda: gt.jacobian(lambda x: torch.tanh(x @ w), mode="reverse")(at.small),
            HAND: lambda: rows_of(False),
        },
        "jacobian, forward": {
            OURS: lambda: gt.jacobian(lambda x: torch.tanh(x @ w), mode="forward")(at.small),
            HAND: lambda: rows_of(True),
        },
        "per_example_grad": {
            OURS: lambda: gt.per_example_grad(at.loss)(w, x),
            HAND: each,
            "a loop": one_by_one,
        },
        "minimax_value_and_grad": {
            OURS: lambda: gt.minimax_value_and_grad(at.loss, 0, 1)(w, x),
            HAND: game,
        },
        "mixed_partial": _mixed(at, v),
    }
    if importlib.util.find_spec("torchjd"):
        from torchjd.autojac import jac

        def of_outputs(f: Callable[[Any], Any], x: Any) -> Any:
            alias = x.detach().requires_grad_()
            return jac(f(alias), alias)[0]

        made["jacobian, reverse"]["torchjd"] = lambda: of_outputs(
            lambda x: torch.tanh(x @ w), at.small
        )
        made["per_example_grad"]["torchjd"] = lambda: of_outputs(
            lambda w: (at.layer(w, x) ** 2).sum(1), w
        )
    return made


def by_duals(f: Callable[[Any], Any], x: Any, t: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        out = f(torch.autograd.forward_ad.make_dual(x, t))
        return tuple(torch.autograd.forward_ad.unpack_dual(out))


def by_transposing(f: Callable[[Any], Any], x: Any, t: Any) -> Any:
    """Computes a pushforward as the transpose of the pullback."""
    alias = x.detach().requires_grad_()
    out = f(alias)
    c = torch.zeros_like(out).requires_grad_()
    (pulled,) = torch.autograd.grad(out, alias, c, create_graph=True)
    return torch.autograd.grad(pulled, c, t)[0]


def _mixed(at: Point, v: Any) -> Ways:
    G = lambda z: at.layer(v, at.layer(at.w, z))
    f = lambda y, g: ((y * g) ** 2).sum()

    def double_backward() -> Any:
        _, (_, first), (y, _) = graded(lambda y, z: f(y, G(z)), at.t, at.x, create=True)
        return torch.autograd.grad((first * at.x).sum(), y)[0]

    def pushed_by_hand() -> Any:
        g, u = by_duals(G, at.x, at.x)
        _, (_, first), (y, _) = graded(f, at.t, g, create=True)
        return torch.autograd.grad((first * u).sum(), y)[0]

    ours = lambda: gt.mixed_partial(f, G, at.t, at.x, at.x)
    return {OURS: ours, HAND: pushed_by_hand, "double backward": double_backward}


def _second_order(at: Point) -> dict[str, Ways]:
    of_w = lambda w: at.loss(w, at.x)
    few = lambda x: (torch.tanh(x @ at.w) ** 2).sum()

    def twice() -> Any:
        _, (g,), (w,) = graded(of_w, at.w, create=True)
        return g.detach(), torch.autograd.grad(g, w, at.v)[0]

    def pushed() -> Any:
        return torch.func.jvp(torch.func.grad(of_w), (at.w,), (at.v,))

    return {
        "hvp, reverse over reverse": {
            OURS: lambda: gt.hvp(of_w, (at.w,), (at.v,), mode="reverse_over_reverse"),
            HAND: twice,
            "torch.autograd": lambda: torch.autograd.functional.hvp(of_w, at.w, at.v),
        },
        "hvp, forward over reverse": {
            OURS: lambda: gt.hvp(of_w, (at.w,), (at.v,), mode="forward_over_reverse"),
            HAND: pushed,
        },
        "hessian": {
            OURS: lambda: gt.hessian(few)(at.small),
            HAND: lambda: torch.func.jacrev(torch.func.jacrev(few))(at.small),
            "torch.func.hessian": lambda: torch.func.hessian(few)(at.small),
        },
    }


# --- edits and rules -----------------------------------------------------------------------


def edit_by_hand(edit: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an identity, implemented as an autograd.Function that changes the cotangent."""

    class Edit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, ct: Any) -> Any:
            return edit(ct)

    return Edit.apply


def _edits(at: Point) -> dict[str, Ways]:
    on = lambda edit: lambda: gradient(at.of_w(edit), at.w)
    clip = lambda ct: ct * torch.clamp(1.0 / torch.linalg.vector_norm(ct), max=1.0)
    through = lambda x: x + (torch.round(x) - x).detach()
    made = {
        "reverse_gradient": {
            OURS: on(gt.reverse_gradient),
            HAND: on(edit_by_hand(lambda ct: -1.0 * ct)),
        },
        "scale_gradient": {
            OURS: on(lambda x: gt.scale_gradient(x, 0.5)),
            HAND: on(edit_by_hand(lambda ct: 0.5 * ct)),
            "a hook": on(_hooked(lambda ct: 0.5 * ct)),
        },
        "stop_gradient": {
            OURS: on(lambda x: x * gt.stop_gradient(x)),
            HAND: on(lambda x: x * x.detach()),
        },
        "clip_gradient": {
            OURS: on(lambda x: gt.clip_gradient(x, max_norm=1.0)),
            HAND: on(edit_by_hand(clip)),
        },
        "transform_gradient": {
            OURS: on(lambda x: gt.transform_gradient(x, lambda ct: 2.0 * ct)),
            HAND: on(edit_by_hand(lambda ct: 2.0 * ct)),
            "a hook": on(_hooked(lambda ct: 2.0 * ct)),
        },
        "replace_gradient": {
            OURS: on(lambda x: gt.replace_gradient(x, at.t)),
            HAND: on(edit_by_hand(lambda ct: at.t)),
        },
        "straight_through": {OURS: on(gt.straight_through(torch.round)), HAND: on(through)},
    }
    if importlib.util.find_spec("pytorch_revgrad"):
        from pytorch_revgrad.functional import revgrad

        one = torch.tensor(1.0)
        made["reverse_gradient"]["pytorch-revgrad"] = on(lambda x: revgrad(x, one))
    return made


def _hooked(edit: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(x: Any) -> Any:
        y = x.view_as(x)
        y.register_hook(edit)
        return y

    return hooked


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, ct: Any) -> Any:
        return ct * ctx.saved_tensors[0]


class _HostExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.from_numpy(np.exp(x.detach().cpu().numpy())).to(x.device)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, ct: Any) -> Any:
        return ct * ctx.saved_tensors[0]


def _rules(at: Point) -> dict[str, Ways]:
    on = lambda f: lambda: gradient(at.of_w(f), at.w)
    exp, host = gt.custom_rule(torch.exp), gt.host_function(np.exp)
    for rule, value in ((exp, torch.exp), (host, host)):
        _with_rule(rule, value)
    return {
        "custom_rule": {OURS: on(exp), HAND: on(_Exp.apply), "torch.exp": on(torch.exp)},
        "host_function": {OURS: on(host), HAND: on(_HostExp.apply)},
    }


def _with_rule(rule: Any, value: Callable[..., Any]) -> None:
    def fwd(x: Any) -> Any:
        y = value(x)
        return y, y

    rule.defvjp(fwd, lambda y, ct: (ct * y,))


# --- memory and accumulation ---------------------------------------------------------------


def _memory(at: Point) -> dict[str, Ways]:
    w, v, x = at.w, at.v, at.x
    encode = lambda w, x: at.layer(w, at.layer(w, x))
    contrast = lambda z: torch.logsumexp(z @ z.T, 1).sum()
    pieces = x.split(at.chunk)
    ours = lambda w: gt.chunked(encode, at.chunk, in_axes=(None, 0), verify=False)(w, x)
    again = lambda w: torch.cat([checkpoint(encode, w, c, use_reentrant=False) for c in pieces])

    def two_passes() -> Any:
        with torch.no_grad():
            z = torch.cat([encode(w, c) for c in pieces])
        total = torch.zeros_like(w)
        for c, ct in zip(pieces, gradient(contrast, z).split(at.chunk), strict=True):
            alias = w.detach().requires_grad_()
            total += torch.autograd.grad(encode(alias, c), alias, ct)[0]
        return total

    G = lambda z: at.layer(v, at.layer(v, z))

    def slopes(G: Callable[..., Any]) -> Callable[[], Any]:
        """Returns a function that differentiates |d loss / dz|^2 with respect to w."""

        def run() -> Any:
            weights, z = w.detach().requires_grad_(), x.detach().requires_grad_()
            out = at.loss(weights, G(z))
            (first,) = torch.autograd.grad(out, z, create_graph=True)
            return torch.autograd.grad((first**2).sum(), weights)[0]

        return run

    return {
        "chunked": {
            OURS: lambda: gradient(lambda w: contrast(ours(w)), w),
            HAND: two_passes,
            "torch.utils.checkpoint": lambda: gradient(lambda w: contrast(again(w)), w),
            "the whole batch": lambda: gradient(lambda w: contrast(encode(w, x)), w),
        },
        "checkpoint": {
            OURS: lambda: gradient(
                lambda w: contrast(gt.checkpoint(encode, verify=False)(w, x)), w
            ),
            HAND: lambda: gradient(
                lambda w: contrast(checkpoint(encode, w, x, use_reentrant=False)), w
            ),
        },
        "frozen": {OURS: slopes(gt.frozen(G, verify=False)), HAND: slopes(G)},
    }


def _accumulation(at: Point) -> dict[str, Ways]:
    w, x = at.w, at.x
    mean = lambda w, x: at.loss(w, x) / len(x)
    net = torch.nn.Linear(*w.shape)
    apply, params, state = gt.make_functional(net)
    buffer = [torch.zeros_like(w).requires_grad_()]

    def summed() -> Any:
        total, value = torch.zeros_like(w), torch.zeros(())
        for c in x.split(at.chunk):
            out, (g,), _ = graded(lambda w, c=c: mean(w, c), w)
            value += out.detach() * len(c)
            total += g * len(c)
        return value / len(x), total / len(x)

    def accumulated() -> Any:
        found = gt.GradientAccumulator()
        for c in x.split(at.chunk):
            found.add({"w": gradient(lambda w, c=c: mean(w, c), w)}, len(c))
        return found.mean()

    def written(write: Callable[[Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            buffer[0].grad = None
            write(gradient(lambda w: at.loss(w, x), buffer[0]))
            return buffer[0].grad

        return run

    def assigned(g: Any) -> None:
        buffer[0].grad = g

    named = list(net.named_parameters())
    leaves = lambda: {name: p.detach().requires_grad_() for name, p in named}

    def called() -> Any:
        p = leaves()
        out = torch.func.functional_call(net, p, (x,))
        return torch.autograd.grad((out**2).sum(), list(p.values()))

    return {
        "microbatched_value_and_grad": {
            OURS: lambda: gt.microbatched_value_and_grad(mean, at.chunk)(w, x),
            HAND: summed,
        },
        "GradientAccumulator": {OURS: accumulated, HAND: lambda: summed()[1]},
        "accumulate_gradients": {
            OURS: written(lambda g: gt.accumulate_gradients(buffer, [g])),
            HAND: written(assigned),
        },
        "assign_gradients": {
            OURS: written(lambda g: gt.assign_gradients(buffer, [g])),
            HAND: written(assigned),
        },
        "make_functional": {
            OURS: lambda: gt.grad(lambda p: (apply(p, state, x)[0] ** 2).sum())(params),
            HAND: called,
        },
    }
