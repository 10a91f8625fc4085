"""Defines small calls of every public operator, for tests of all operators.

A `Use` applies an operator to a function that calls `World.part` several times. `part` is an
elementwise function of an array of four numbers; a test may replace `part` with a function that
counts, raises or returns another value. The result is a pytree of arrays or plain values. If `rows`
is set, entry i of the result depends only on entry i of the argument, so that tests can compute the
expected value of one entry separately.
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
    """The inputs of a `Use`: the gradtools namespace, the function `part` and the array x."""

    gt: Any
    part: Callable[[Any], Any]
    x: Any

    def twice(self, x: Any) -> Any:
        """Compute the user's function, which calls `part` twice."""
        return self.part(self.part(x) * 0.5)

    def loss(self, x: Any) -> Any:
        return self.gt.xp.sum(self.twice(x).real)

    @property
    def t(self) -> Any:
        """Return a tangent of ones."""
        return self.gt.xp.ones_like(self.x)

    @property
    def one(self) -> Any:
        """Return the number one on the device of x."""
        return self.gt.xp.prod(self.t)

    @property
    def torch(self) -> bool:
        return self.gt.__name__.endswith("torch")


@dataclass(frozen=True)
class Use:
    """A program that calls one public operator or function.

    Attributes:
        name: The public name, optionally with a variant after a colon.
        make: Returns the program for a `World`, a function of the array x that may be called
            repeatedly.
        rows: Whether the result has the shape of x and entry i depends only on entry i of x.
        planted: Whether the program calls `part`.
        backends: The backends that support the program.
        retries: Whether the operator tries another method if f raises an error.
    """

    name: str
    make: Callable[[World], Callable[[Any], Any]]
    rows: bool = False
    planted: bool = True
    backends: tuple[str, ...] = ("torch", "jax")
    retries: bool = False

    def __str__(self) -> str:
        return self.name

    def run(self, w: World) -> Any:
        """Create the program and call it once."""
        return self.make(w)(w.x)

    @property
    def public(self) -> str:
        return self.name.partition(":")[0]


def healthy(gt: Any) -> Callable[[Any], Any]:
    """Return the default `part` for arrays of the framework and of NumPy."""
    return lambda x: (np if isinstance(x, np.ndarray) else gt.xp).sin(x) + x * x


def slope(gt: Any, x: Any) -> Any:
    return (np if isinstance(x, np.ndarray) else gt.xp).cos(x) + 2 * x


# --- uses that need more than one line ----------------------------------------------------


def _rule(w: World, where: str) -> Any:
    """Return a program with a custom rule that calls `w.part` in f, fwd, bwd or the jvp rule."""
    plain = healthy(w.gt)
    f = w.gt.custom_rule(w.part if where == "value" else plain)
    here = w.part if where in ("fwd", "jvp") else plain
    if where == "jvp":
        f.defjvp(lambda xs, ts: (here(*xs), slope(w.gt, xs[0]) * ts[0]))
    elif where == "bwd":
        f.defvjp(lambda x: (plain(x), x), lambda x, c: (slope(w.gt, x) * c + 0 * w.part(x),))
    else:
        f.defvjp(lambda x: (here(x), x), lambda x, c: (slope(w.gt, x) * c,))
    if where == "value":
        return lambda x: f(w.gt.stop_gradient(x))
    return lambda x: w.gt.vjp(f, x)[1](w.t)[0]


def _host(w: World, where: str) -> Any:
    plain = healthy(w.gt)
    kernel = w.gt.host_function(w.part if where == "kernel" else plain)
    back = w.part if where == "bwd" else plain
    bwd = w.gt.host_function(lambda x, c: slope(w.gt, x) * c + 0 * back(x))
    kernel.defvjp(lambda x: (kernel(x), x), lambda x, c: (bwd(x, c),))
    return w.gt.grad(lambda x: w.gt.xp.sum(kernel(x)))


def _functionalized(w: World) -> Any:
    apply, params, state = w.gt.make_functional(_module(w))
    gradient = w.gt.grad(lambda params, x: w.gt.xp.sum(apply(params, state, x)[0]))
    return lambda x: gradient(params, x)


def _module(w: World) -> Any:
    """Return a module with one parameter that calls `part` twice."""
    if w.torch:
        import torch

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = torch.nn.Parameter(w.x.new_ones((), dtype=torch.float64))

            def forward(self, x: Any) -> Any:
                return w.twice(x * self.a)

        return Net()
    return _equinox_module()(w.one, w.twice)


@cache
def _equinox_module() -> Any:
    """Return the equinox module class, which is created only once, because JAX never frees it."""
    import equinox

    class Module(equinox.Module):
        a: Any
        twice: Any = equinox.field(static=True)

        def __call__(self, x: Any) -> Any:
            return self.twice(x * self.a)

    return Module


def _written(w: World, name: str) -> Any:
    write, gradient = getattr(w.gt, name), w.gt.grad(w.loss)
    if w.torch:
        return lambda x: write([x.detach().clone().requires_grad_()], [gradient(x)])[0].grad
    return lambda x: write([x], [gradient(x)])[0]


def _accumulated(w: World) -> Any:
    gradient = w.gt.grad(w.loss)

    def run(x: Any) -> Any:
        total = w.gt.GradientAccumulator(compensated=True)
        for weight in (1, 2):
            total.add(gradient(x), weight)
        return total.mean()

    return run


def _gathered(w: World) -> Any:
    import jax

    gradient = w.gt.grad(lambda x: w.gt.all_gather(w.twice(x), axis_name="i").sum())
    rows = jax.vmap(gradient, axis_name="i")
    return lambda x: rows(x[:, None])[:, 0]


def _aux(w: World) -> Any:
    both = w.gt.value_and_grad(lambda x: (w.loss(x), w.part(x)), has_aux=True)

    def run(x: Any) -> Any:
        (value, aux), grads = both(x)
        return value, aux, grads

    return run


def _mixed(w: World, planted: str) -> Any:
    inner = w.twice if planted == "f" else healthy(w.gt)
    G = w.twice if planted == "G" else healthy(w.gt)
    f = lambda y, g: w.gt.xp.sum(inner(y) * g * g)
    return lambda x: w.gt.mixed_partial(f, G, x, x, w.t)


def _frozen(w: World, order: int) -> Any:
    G = w.gt.frozen(w.twice)
    gradient = w.gt.grad(lambda x: w.gt.xp.sum(G(x)))
    return gradient if order == 1 else w.gt.grad(lambda x: w.gt.xp.sum(gradient(x) ** 2))


def _gradient(w: World, f: Callable[[Any], Any]) -> Any:
    """Return the gradient of the sum over the entries of f(x)."""
    return w.gt.grad(lambda x: w.gt.xp.sum(f(x)))


def _through(w: World, edit: Callable[[Any], Any]) -> Any:
    """Return the gradient through an edit between two calls of `part`."""
    return _gradient(w, lambda x: w.part(edit(w.part(x) * 0.5)))


def _mathematics(formula: Any) -> str:
    """Return the text of a formula without the numerical error, which depends on random points."""
    return str(formula).partition(" (greatest")[0]


def _minimax(w: World) -> Any:
    both = w.gt.minimax_value_and_grad(lambda x, y: w.loss(x * y), 0, 1)
    return lambda x: both(x, w.t)


def _per_example(w: World) -> Any:
    gradient = w.gt.per_example_grad(lambda a, x: w.loss(a * x))
    return lambda x: gradient(w.one, x)


def _marked(w: World) -> Any:
    return lambda x: w.part(w.gt.retain_gradient(w.part(x), "first"))


def _solution(w: World, planted: str) -> Any:
    plain = healthy(w.gt)
    of = {"F": plain, "solve": plain, planted: w.part}
    return w.gt.implicit_solution(lambda z, x: z - of["F"](x), lambda x: of["solve"](x), "cg")


def _retained(w: World) -> Any:
    return w.gt.retained_gradients(lambda x: w.gt.xp.sum(_marked(w)(x)))


def _straight(w: World) -> Any:
    through = w.gt.straight_through(w.twice)
    return _gradient(w, lambda x: through(x) * x)


def _microbatched(w: World) -> Any:
    loss = w.gt.microbatched_value_and_grad(lambda a, x: w.gt.xp.mean(w.twice(a * x)), 3)
    return lambda x: loss(w.one, x)


def _of_f(operator: str, *options: Any, **more: Any) -> Callable[[World], Any]:
    """Return `make` for an operator that maps the function `twice` to another function of x."""
    return lambda w: getattr(w.gt, operator)(w.twice, *options, **more)


def _of_loss(operator: str, *options: Any, **more: Any) -> Callable[[World], Any]:
    return lambda w: getattr(w.gt, operator)(w.loss, *options, **more)


def _hvp(*mode: str) -> Callable[[World], Any]:
    return lambda w: lambda x: w.gt.hvp(w.loss, (x,), (w.t,), *mode)[1][0]


USES = (
    Use("grad", _of_loss("grad"), rows=True),
    Use("value_and_grad", _of_loss("value_and_grad")),
    Use("value_and_grad: aux", _aux),
    Use("minimax_value_and_grad", _minimax),
    Use("vjp", lambda w: lambda x: w.gt.vjp(w.twice, x)[1](w.t)[0], rows=True),
    Use("jvp", lambda w: lambda x: w.gt.jvp(w.twice, (x,), (w.t,))[1], rows=True),
    Use("linearize", lambda w: lambda x: w.gt.linearize(w.twice, x)[1](w.t), rows=True),
    Use("jacobian", _of_f("jacobian")),
    Use("jacobian: forward", _of_f("jacobian", mode="forward")),
    Use("jacobian: a loop", _of_f("jacobian", chunk_size=1)),
    Use("hvp", _hvp(), rows=True),
    Use("hvp: forward over reverse", _hvp("forward_over_reverse"), rows=True),
    Use("hvp: reverse over reverse", _hvp("reverse_over_reverse"), rows=True),
    Use("hessian", _of_loss("hessian")),
    Use("per_example_grad", _per_example, rows=True),
    Use(
        "per_example_grad: a loop", _of_loss("per_example_grad", in_axes=0, chunk_size=1), rows=True
    ),
    Use("mixed_partial", lambda w: _mixed(w, "f"), rows=True),
    Use("mixed_partial: G", lambda w: _mixed(w, "G"), rows=True),
    Use("implicit_solution: F", lambda w: _gradient(w, _solution(w, "F"))),
    Use("implicit_solution: solve", lambda w: _gradient(w, _solution(w, "solve"))),
    Use("retained_gradients", _retained),
    Use("retain_gradient", lambda w: _gradient(w, _marked(w)), rows=True),
    Use("vmap", _of_f("vmap"), rows=True),
    Use("vmap: of grad", lambda w: w.gt.vmap(w.gt.grad(w.loss)), rows=True),
    Use("grad: of vmap", lambda w: _gradient(w, w.gt.vmap(w.twice)), rows=True),
    Use("grad: of grad", lambda w: _gradient(w, w.gt.grad(w.loss)), rows=True),
    Use("checkpoint", lambda w: _gradient(w, w.gt.checkpoint(w.twice)), rows=True),
    Use(
        "compile", lambda w: w.gt.compile(w.gt.grad(w.loss)), rows=True, backends=("jax",)
    ),  # in PyTorch, compilation takes seconds
    Use("reverse_gradient", lambda w: _through(w, w.gt.reverse_gradient), rows=True),
    Use("scale_gradient", lambda w: _through(w, lambda x: w.gt.scale_gradient(x, 3.0)), rows=True),
    Use(
        "stop_gradient",
        lambda w: _gradient(w, lambda x: w.twice(x) * w.gt.stop_gradient(x)),
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
    Use(
        "replace_gradient",
        lambda w: _through(w, lambda x: w.gt.replace_gradient(x, w.t)),
        rows=True,
    ),
    Use("straight_through", _straight, rows=True),
    Use(
        "straight_through: the surrogate",
        lambda w: _gradient(w, w.gt.straight_through(w.gt.xp.round, surrogate=w.twice)),
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
    Use("chunked", lambda w: _gradient(w, w.gt.chunked(w.twice, 2)), rows=True),
    Use(
        "chunked: compared at each pass",
        lambda w: _gradient(w, w.gt.chunked(w.twice, 3, verify=True)),
        rows=True,
    ),
    Use("microbatched_value_and_grad", _microbatched),
    Use("make_functional", _functionalized),
    Use("GradientAccumulator", _accumulated, rows=True),
    Use("accumulate_gradients", lambda w: _written(w, "accumulate_gradients"), rows=True),
    Use("assign_gradients", lambda w: _written(w, "assign_gradients"), rows=True),
    # in PyTorch all_gather needs several processes
    Use("all_gather", _gathered, rows=True, backends=("jax",)),
    Use("why_zero", lambda w: lambda x: bool(w.gt.why_zero(w.loss, x))),
    Use("gradient_graph", lambda w: lambda x: len(w.gt.gradient_graph(w.loss, x).nodes)),
    Use(
        "gradient_graph: twice",
        lambda w: lambda x: len(w.gt.gradient_graph(w.loss, x, order=2).nodes),
    ),
    Use("formula", lambda w: lambda x: _mathematics(w.gt.formula(w.loss, x)), retries=True),
    Use("asarray", lambda w: lambda x: w.gt.asarray(w.gt.to_numpy(x)), rows=True, planted=False),
    Use("to_numpy", lambda w: w.gt.to_numpy, rows=True, planted=False),
    Use("random_key", lambda w: lambda x: w.gt.random_key(3), planted=False),
    Use("split_key", lambda w: lambda x: w.gt.split_key(w.gt.random_key(3), 3), planted=False),
    Use("ArraySpec", lambda w: lambda x: w.gt.ArraySpec((2,), "float32"), planted=False),
    Use("is_recomputing", lambda w: lambda x: w.gt.is_recomputing(), planted=False),
    Use("xp", lambda w: w.gt.xp.sum, planted=False),
)


def leaves(gt: Any, tree: Any) -> list[np.ndarray]:
    """Return the leaves of a result as NumPy arrays for bitwise comparison."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(gt, tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in leaves(gt, item)]
    if hasattr(tree, "a"):  # `a` is the only parameter of the equinox module
        return leaves(gt, tree.a)
    plain = isinstance(tree, str | bool | int) or type(tree).__name__ == "ArraySpec"
    return [np.array(str(tree))] if plain else [gt.to_numpy(tree)]


# Public names that do not run under jit: analysis tools, conversions, and values without arrays.
NOT_JITTED = {
    *("why_zero", "formula", "asarray", "to_numpy"),
    *("gradient_graph", "ArraySpec", "is_recomputing"),
}
JITTED = [use for use in USES if "jax" in use.backends and use.public not in NOT_JITTED]
