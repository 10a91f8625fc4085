"""Every public operator in one small use each, as data, for what must hold of all of them.

A `Use` runs its operator on a function that calls `w.part` at several places: an elementwise
function of an array of four numbers, which a test may replace by one that counts, raises, or
returns something else. The result is a tree of arrays. Where `rows` is set, entry i of the result
is a function of entry i of the argument alone; that makes an oracle which needs no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

POINT = np.array([0.3, -1.2, 0.7, 2.0])


@dataclass(frozen=True)
class World:
    """What a use may touch: the namespace, the user's function, the array."""

    gt: Any
    part: Callable[[Any], Any]
    x: Any

    def twice(self, x: Any) -> Any:
        """The user's function, which calls `part` two times."""
        return self.part(self.part(x) * 0.5)

    def loss(self, x: Any) -> Any:
        return self.gt.xp.sum(self.twice(x).real)

    @property
    def t(self) -> Any:
        """A direction with the entries one."""
        return self.gt.xp.ones_like(self.x)

    @property
    def one(self) -> Any:
        """The number one, on x's device."""
        return self.gt.xp.prod(self.t)

    @property
    def torch(self) -> bool:
        return self.gt.__name__.endswith("torch")


@dataclass(frozen=True)
class Use:
    """One use of a public name.

    Attributes:
        name: The public name, and after a colon which use of it.
        run: The use.
        rows: Whether the result, of the shape of x, depends on x entry by entry.
        planted: Whether `part` is called at all.
        backends: Where it runs.
        retries: Whether it takes another way where f fails once.
    """

    name: str
    run: Callable[[World], Any]
    rows: bool = False
    planted: bool = True
    backends: tuple[str, ...] = ("torch", "jax")
    retries: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def public(self) -> str:
        return self.name.partition(":")[0]


def healthy(gt: Any) -> Callable[[Any], Any]:
    """The user's function as it should be, of the framework's arrays and of NumPy's."""
    return lambda x: (np if isinstance(x, np.ndarray) else gt.xp).sin(x) + x * x


def slope(gt: Any, x: Any) -> Any:
    return (np if isinstance(x, np.ndarray) else gt.xp).cos(x) + 2 * x


# --- uses that need more than a line ------------------------------------------------------


def _rule(w: World, where: str) -> Any:
    """A custom rule for `part`, with the planted function in one of its places."""
    plain = healthy(w.gt)
    f = w.gt.custom_rule(w.part if where == "value" else plain)
    here = w.part if where in ("fwd", "jvp") else plain
    if where == "jvp":
        f.defjvp(lambda xs, ts: (here(*xs), slope(w.gt, xs[0]) * ts[0]))
    elif where == "bwd":
        f.defvjp(lambda x: (plain(x), x), lambda x, c: (slope(w.gt, x) * c + 0 * w.part(x),))
    else:
        f.defvjp(lambda x: (here(x), x), lambda x, c: (slope(w.gt, x) * c,))
    return w.gt.vjp(f, w.x)[1](w.t)[0] if where != "value" else f(w.gt.stop_gradient(w.x))


def _host(w: World, where: str) -> Any:
    plain = healthy(w.gt)
    kernel = w.gt.host_function(w.part if where == "kernel" else plain)
    back = w.part if where == "bwd" else plain
    bwd = w.gt.host_function(lambda x, c: slope(w.gt, x) * c + 0 * back(x))
    kernel.defvjp(lambda x: (kernel(x), x), lambda x, c: (bwd(x, c),))
    return w.gt.grad(lambda x: w.gt.xp.sum(kernel(x)))(w.x)


def _functionalized(w: World) -> Any:
    apply, params, state = w.gt.functionalize(_module(w))
    return w.gt.grad(lambda params: w.gt.xp.sum(apply(params, state, w.x)[0]))(params)


def _module(w: World) -> Any:
    """A module with one parameter that calls `part` twice."""
    if w.torch:
        import torch

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = torch.nn.Parameter(w.x.new_ones((), dtype=torch.float64))

            def forward(self, x: Any) -> Any:
                return w.twice(x * self.a)

        return Net()
    return _equinox_module()(w.gt.asarray(np.ones(())), w.twice)


@cache
def _equinox_module() -> Any:
    """The class, made once: JAX keeps every class that is registered with it."""
    import equinox

    class Module(equinox.Module):
        a: Any
        twice: Any = equinox.field(static=True)

        def __call__(self, x: Any) -> Any:
            return self.twice(x * self.a)

    return Module


def _written(w: World, name: str) -> Any:
    write = getattr(w.gt, name)
    grads = w.gt.grad(w.loss)(w.x)
    if w.torch:
        return write([w.x.detach().clone().requires_grad_()], [grads])[0].grad
    return write([w.x], [grads])[0]


def _accumulated(w: World) -> Any:
    total = w.gt.GradientAccumulator(compensated=True)
    for weight in (1, 2):
        total.add(w.gt.grad(w.loss)(w.x), weight)
    return total.mean()


def _gathered(w: World) -> Any:
    import jax

    row = lambda x: w.gt.grad(lambda x: w.gt.gather(w.twice(x), axis_name="i").sum())(x)
    return jax.vmap(row, axis_name="i")(w.x[:, None])[:, 0]


def _aux(w: World) -> Any:
    (value, aux), grads = w.gt.value_and_grad(lambda x: (w.loss(x), w.part(x)), has_aux=True)(w.x)
    return value, aux, grads


def _mixed(w: World, planted: str) -> Any:
    f = w.twice if planted == "f" else healthy(w.gt)
    G = w.twice if planted == "G" else healthy(w.gt)
    return w.gt.mixed_partial(lambda y, g: w.gt.xp.sum(f(y) * g * g), G, w.x, w.x, w.t)


def _frozen(w: World, order: int) -> Any:
    G = w.gt.frozen(w.twice)
    gradient = w.gt.grad(lambda x: w.gt.xp.sum(G(x)))
    if order == 1:
        return gradient(w.x)
    return w.gt.grad(lambda x: w.gt.xp.sum(gradient(x) ** 2))(w.x)


def _through(w: World, edit: Callable[[Any], Any]) -> Any:
    """The gradient where the edit stands between two calls of `part`."""
    return w.gt.grad(lambda x: w.gt.xp.sum(w.part(edit(w.part(x) * 0.5))))(w.x)


def _compared(w: World) -> Any:
    graphs = [w.gt.gradient_graph(w.loss, w.x, order=k) for k in (0, 1)]
    return len(w.gt.graph_diff(*graphs).matched)


def _measured(w: World) -> Any:
    cost = w.gt.measure(w.gt.grad(w.loss), w.x)
    return cost.flops, *cost.notes  # f that has no second derivative is told in a note


def _guarded(w: World) -> Any:
    loss = w.gt.guard_gradients(w.loss)
    return [loss(w.x) for _ in range(2)]


USES = (
    Use("grad", lambda w: w.gt.grad(w.loss)(w.x), rows=True),
    Use("value_and_grad", lambda w: w.gt.value_and_grad(w.loss)(w.x)),
    Use("value_and_grad: aux", _aux),
    Use(
        "minimax_value_and_grad",
        lambda w: w.gt.minimax_value_and_grad(lambda x, y: w.loss(x * y), 0, 1)(w.x, w.t),
    ),
    Use("vjp", lambda w: w.gt.vjp(w.twice, w.x)[1](w.t)[0], rows=True),
    Use("jvp", lambda w: w.gt.jvp(w.twice, (w.x,), (w.t,))[1], rows=True),
    Use("linearize", lambda w: w.gt.linearize(w.twice, w.x)[1](w.t), rows=True),
    Use("jacobian", lambda w: w.gt.jacobian(w.twice)(w.x)),
    Use("jacobian: forward", lambda w: w.gt.jacobian(w.twice, mode="forward")(w.x)),
    Use("jacobian: a loop", lambda w: w.gt.jacobian(w.twice, chunk_size=1)(w.x)),
    Use("hvp", lambda w: w.gt.hvp(w.loss, (w.x,), (w.t,))[1][0], rows=True),
    Use(
        "hvp: forward over reverse",
        lambda w: w.gt.hvp(w.loss, (w.x,), (w.t,), "forward_over_reverse")[1][0],
        rows=True,
    ),
    Use(
        "hvp: reverse over reverse",
        lambda w: w.gt.hvp(w.loss, (w.x,), (w.t,), "reverse_over_reverse")[1][0],
        rows=True,
    ),
    Use("hessian", lambda w: w.gt.hessian(w.loss)(w.x)),
    Use(
        "per_example_grad",
        lambda w: w.gt.per_example_grad(lambda a, x: w.loss(a * x))(w.one, w.x),
        rows=True,
    ),
    Use(
        "per_example_grad: a loop",
        lambda w: w.gt.per_example_grad(lambda x: w.loss(x), in_axes=0, chunk_size=1)(w.x),
        rows=True,
    ),
    Use("mixed_partial", lambda w: _mixed(w, "f"), rows=True),
    Use("mixed_partial: G", lambda w: _mixed(w, "G"), rows=True),
    Use("vmap", lambda w: w.gt.vmap(w.twice)(w.x), rows=True),
    Use("vmap: of grad", lambda w: w.gt.vmap(w.gt.grad(w.loss))(w.x), rows=True),
    Use(
        "grad: of vmap", lambda w: w.gt.grad(lambda x: w.gt.vmap(w.twice)(x).sum())(w.x), rows=True
    ),
    Use(
        "grad: of grad",
        lambda w: w.gt.grad(lambda x: w.gt.xp.sum(w.gt.grad(w.loss)(x)))(w.x),
        rows=True,
    ),
    Use(
        "checkpoint",
        lambda w: w.gt.grad(lambda x: w.gt.xp.sum(w.gt.checkpoint(w.twice)(x)))(w.x),
        rows=True,
    ),
    Use(
        "compile", lambda w: w.gt.compile(w.gt.grad(w.loss))(w.x), rows=True, backends=("jax",)
    ),  # in PyTorch a compilation takes seconds: see `COMPILED`
    Use("reverse_gradient", lambda w: _through(w, w.gt.reverse_gradient), rows=True),
    Use("scale_gradient", lambda w: _through(w, lambda x: w.gt.scale_gradient(x, 3.0)), rows=True),
    Use(
        "stop_gradient",
        lambda w: w.gt.grad(lambda x: w.gt.xp.sum(w.twice(x) * w.gt.stop_gradient(x)))(w.x),
        rows=True,
    ),
    Use("clip_gradient", lambda w: _through(w, lambda x: w.gt.clip_gradient(x, max_norm=0.1))),
    Use(
        "clip_gradient: values",
        lambda w: _through(w, lambda x: w.gt.clip_gradient(x, max_value=0.1)),
        rows=True,
    ),
    Use(
        "transform_gradient",
        lambda w: _through(w, lambda x: w.gt.transform_gradient(x, w.part)),
        rows=True,
    ),
    Use("known_gradient", lambda w: _through(w, lambda x: w.gt.known_gradient(x, w.t)), rows=True),
    Use(
        "straight_through",
        lambda w: w.gt.grad(lambda x: w.gt.xp.sum(w.gt.straight_through(w.twice)(x) * x))(w.x),
        rows=True,
    ),
    Use(
        "straight_through: the surrogate",
        lambda w: w.gt.grad(
            lambda x: w.gt.xp.sum(w.gt.straight_through(w.gt.xp.round, surrogate=w.twice)(x))
        )(w.x),
        rows=True,
    ),
    *(
        Use(f"custom_rule: {where}", lambda w, where=where: _rule(w, where), rows=True)
        for where in ("value", "fwd", "bwd", "jvp")
    ),
    *(
        Use(f"host_function: {where}", lambda w, where=where: _host(w, where), rows=True)
        for where in ("kernel", "bwd")
    ),
    Use("frozen", lambda w: _frozen(w, 1), rows=True),
    Use("frozen: second order", lambda w: _frozen(w, 2), rows=True),
    Use(
        "chunked",
        lambda w: w.gt.grad(lambda x: w.gt.xp.sum(w.gt.chunked(w.twice, 2)(x)))(w.x),
        rows=True,
    ),
    Use(
        "chunked: none retained",
        lambda w: w.gt.grad(
            lambda x: w.gt.xp.sum(w.gt.chunked(w.twice, 3, retain=0, verify=True)(x))
        )(w.x),
        rows=True,
    ),
    Use(
        "microbatched",
        lambda w: w.gt.microbatched(lambda a, x: w.gt.xp.mean(w.twice(a * x)), 3)(w.one, w.x),
    ),
    Use("functionalize", _functionalized),
    Use("GradientAccumulator", _accumulated, rows=True),
    Use("accumulate_gradients", lambda w: _written(w, "accumulate_gradients"), rows=True),
    Use("assign_gradients", lambda w: _written(w, "assign_gradients"), rows=True),
    Use("gather", _gathered, rows=True, backends=("jax",)),  # in PyTorch it needs processes
    Use("dependence", lambda w: str(w.gt.dependence(w.twice, w.x))),
    Use("why_zero", lambda w: bool(w.gt.why_zero(w.loss, w.x))),
    Use("guard_gradients", _guarded),
    Use("gradient_graph", lambda w: len(w.gt.gradient_graph(w.loss, w.x).nodes)),
    Use("gradient_graph: twice", lambda w: len(w.gt.gradient_graph(w.loss, w.x, order=2).nodes)),
    Use("graph_diff", _compared),
    Use("formula", lambda w: str(w.gt.formula(w.loss, w.x)), retries=True),
    Use("measure", _measured),
    Use("asarray", lambda w: w.gt.asarray(w.gt.to_numpy(w.x)), rows=True, planted=False),
    Use("to_numpy", lambda w: w.gt.to_numpy(w.x), rows=True, planted=False),
    Use("key", lambda w: w.gt.key(3), planted=False),
    Use("split", lambda w: w.gt.split(w.gt.key(3), 3), planted=False),
    Use("Spec", lambda w: w.gt.Spec((2,), "float32"), planted=False),
    Use("is_replaying", lambda w: w.gt.is_replaying(), planted=False),
    Use("xp", lambda w: w.gt.xp.sum(w.x), planted=False),
)
COMPILED = Use("compile", lambda w: w.gt.compile(w.gt.grad(w.loss))(w.x), rows=True)


def leaves(gt: Any, tree: Any) -> list[np.ndarray]:
    """A result as NumPy arrays, to be compared bit for bit."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(gt, tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in leaves(gt, item)]
    if hasattr(tree, "a"):  # the one parameter of the equinox module
        return leaves(gt, tree.a)
    plain = isinstance(tree, str | bool | int) or type(tree).__name__ == "Spec"
    return [np.array(str(tree))] if plain else [gt.to_numpy(tree)]
