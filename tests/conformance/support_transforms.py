"""Defines transforms of a function with a custom rule, each with its expected result.

A transform takes a `Case` and yields pairs of a computed and an expected value. The expected value
is computed from the closed form of the rule by sums and products in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tests.conformance.support_ways import Way
from tests.support.native import MIXES, NATIVE

Pairs = Iterator[tuple[Any, Any]]
POINT = np.array([0.5, -1.5, 2.0, 1.2, -0.4, 0.7])
THIRD_MIXES = tuple(map("".join, product("rf", repeat=3)))


@dataclass(frozen=True)
class Transform:
    """A transform, which is a row of the support matrix.

    Attributes:
        name: The name in the table.
        order: The highest order of derivative that the transform computes.
        run: A function of a `Case` that yields pairs of computed and expected values.
        backend: The only backend that has the transform, or None if both backends have it.
        halves: Whether the transform needs a function of two arguments.
    """

    name: str
    order: int
    run: Callable[[Case], Pairs]
    backend: str | None = None
    halves: bool = False


class Case:
    """A rule in one backend, with primals, tangents and exact derivatives."""

    def __init__(self, gt: Any, backend: str, way: Way) -> None:
        self.gt, self.native, self.way = gt, NATIVE[backend], way
        self.f = way.make(gt)
        self.X = POINT[: way.size]
        self.V, self.W, self.U = (np.cos(np.arange(way.size) * s + s) for s in (1.0, 2.0, 3.0))
        self.D = way.at(self.X)
        self.C = np.cos(np.arange(len(self.D[0])) + 0.5)
        self.many = np.array([self.X, self.X * 0.5, self.X[::-1] * 0.8, self.X - 0.3])
        self.some = self.many[:2]
        self.arrays = tuple(map(self.array, (self.X, self.V, self.W, self.U)))

    def array(self, x: Any) -> Any:
        return self.native.array(x)

    @property
    def loss(self) -> Callable[[Any], Any]:
        """Return a scalar-valued loss of a vector."""
        c, f = self.array(self.C), self.f
        return lambda x: (f(x) * c).sum()

    # --- expected values at x

    def value(self, x: np.ndarray) -> np.ndarray:
        return self.way.at(x)[0]

    def jacobian(self, x: np.ndarray) -> np.ndarray:
        return self.way.at(x)[1]

    def gradient(self, x: np.ndarray) -> np.ndarray:
        return self.C @ self.jacobian(x)

    def hessian(self, x: np.ndarray) -> np.ndarray:
        return np.einsum("i,ijk->jk", self.C, self.way.at(x)[2])

    def third(self, x: np.ndarray) -> np.ndarray:
        return np.einsum("i,ijkl->jkl", self.C, self.way.at(x)[3])

    def each(self, what: Callable[[np.ndarray], np.ndarray], many: np.ndarray) -> np.ndarray:
        return np.array([what(x) for x in many])

    # --- the body of a loop, which preserves the length of the vector

    def body(self, x: Any) -> Any:
        tail = x * 0.5
        y = self.f(x)[:3] * 0.1
        return tail + (y if self.way.size == 3 else self.gt.xp.concat([y, y]))

    def body_at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        d = [t[:3] for t in self.way.at(x)]
        if self.way.size == 6:
            d = [np.concatenate([t, t]) for t in d]
        return 0.5 * x + 0.1 * d[0], 0.5 * np.eye(len(x)) + 0.1 * d[1], 0.1 * d[2]

    def loop_at(self, x: np.ndarray, times: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the value, Jacobian and second derivative of the body applied `times` times."""
        n = len(x)
        y, j, h = x, np.eye(n), np.zeros((n, n, n))
        for _ in range(times):
            y, dj, dh = self.body_at(y)
            h = np.einsum("iab,aj,bk->ijk", dh, j, j) + np.einsum("ia,ajk->ijk", dj, h)
            j = dj @ j
        return y, j, h


def nth(api: Any, mix: str, f: Any, x: Any, along: list[Any]) -> Any:
    """Return the nested derivative of f with the modes in `mix`, from the outermost inward."""
    if not mix:
        return f(x)
    inner = lambda x: nth(api, mix[1:], f, x, along[1:])
    if mix[0] == "f":
        return api.jvp(inner, (x,), (along[0],))[1]
    return (api.grad(inner)(x) * along[0]).sum()


# --- in both backends --------------------------------------------------------------------


def _grad(c: Case) -> Pairs:
    yield c.gt.grad(c.loss)(c.arrays[0]), c.gradient(c.X)
    value, grad = c.gt.value_and_grad(c.loss)(c.arrays[0])
    yield value, c.C @ c.D[0]
    yield grad, c.gradient(c.X)


def _vjp(api: Callable[[Case], Any]) -> Any:
    def run(c: Case) -> Pairs:
        out, pullback = api(c).vjp(c.f, c.arrays[0])
        yield out, c.D[0]
        yield pullback(c.array(c.C))[0], c.gradient(c.X)

    return run


def _jvp(api: Callable[[Case], Any]) -> Any:
    def run(c: Case) -> Pairs:
        out, pushed = api(c).jvp(c.f, c.arrays[:1], c.arrays[1:2])
        yield out, c.D[0]
        yield pushed, c.D[1] @ c.V

    return run


def _linearize(c: Case) -> Pairs:
    out, push = c.gt.linearize(c.f, c.arrays[0])
    yield out, c.D[0]
    for k, direction in ((1, c.V), (2, c.W)):
        yield push(c.arrays[k]), c.D[1] @ direction


def _jacobian(mode: str) -> Any:
    return lambda c: [(c.gt.jacobian(c.f, mode=mode)(c.arrays[0]), c.D[1])]


def _hvp(mode: str) -> Any:
    def run(c: Case) -> Pairs:
        (g,), (h,) = c.gt.hvp(c.loss, c.arrays[:1], c.arrays[1:2], mode=mode)
        yield g, c.gradient(c.X)
        yield h, c.hessian(c.X) @ c.V

    return run


def _per_example(c: Case) -> Pairs:
    loss = c.loss
    each = c.gt.per_example_grad(lambda w, x: loss(w * x))
    w = np.ones(c.way.size) * 1.1
    found = each(c.array(w), c.array(c.some))
    yield found, np.array([c.gradient(w * x) * x for x in c.some])


def _order(mix: str, api: Callable[[Case], Any]) -> Any:
    def run(c: Case) -> Pairs:
        x, v, w, u = c.arrays
        along = [w, v] if len(mix) == 2 else [u, w, v]
        found = nth(api(c), mix, c.loss, x, along)
        if len(mix) == 2:
            yield found, c.W @ c.hessian(c.X) @ c.V
        else:
            yield found, np.einsum("jkl,j,k,l", c.third(c.X), c.U, c.W, c.V)

    return run


def _own(c: Case) -> Any:
    return c.gt


def _native(c: Case) -> Any:
    return c.native


# vmap


def _vmap_value(c: Case) -> Pairs:
    yield c.native.vmap(c.f)(c.array(c.many)), c.each(c.value, c.many)


def _vmap_grad(c: Case) -> Pairs:
    yield c.gt.vmap(c.gt.grad(c.loss))(c.array(c.many)), c.each(c.gradient, c.many)
    yield c.native.vmap(c.native.grad(c.loss))(c.array(c.many)), c.each(c.gradient, c.many)


def _grad_vmap(c: Case) -> Pairs:
    total = lambda xs: c.native.vmap(c.loss)(xs).sum()
    yield c.gt.grad(total)(c.array(c.many)), c.each(c.gradient, c.many)
    yield c.native.grad(total)(c.array(c.many)), c.each(c.gradient, c.many)


def _vmap_jvp(c: Case) -> Pairs:
    push = lambda x: c.gt.jvp(c.f, (x,), c.arrays[1:2])[1]
    yield c.gt.vmap(push)(c.array(c.some)), c.each(lambda x: c.jacobian(x) @ c.V, c.some)


def _jvp_vmap(c: Case) -> Pairs:
    xs, dxs = c.some, c.some[::-1].copy()
    found = c.gt.jvp(c.gt.vmap(c.f), (c.array(xs),), (c.array(dxs),))[1]
    yield found, np.array([c.jacobian(x) @ d for x, d in zip(xs, dxs, strict=True)])


def _vmap_vmap(c: Case) -> Pairs:
    grid = c.many.reshape(2, 2, -1)
    yield (
        c.native.vmap(c.native.vmap(c.f))(c.array(grid)),
        c.each(c.value, c.many).reshape(2, 2, -1),
    )


def _vmap_vmap_grad(c: Case) -> Pairs:
    grid = c.many.reshape(2, 2, -1)
    found = c.native.vmap(c.native.vmap(c.native.grad(c.loss), 0), 1)(c.array(grid))
    yield found, np.swapaxes(c.each(c.gradient, c.many).reshape(2, 2, -1), 0, 1)


def _vmap_cotangents(c: Case) -> Pairs:
    """Yield results of vmap over cotangents with shared residuals."""
    _, pullback = c.native.vjp(c.f, c.arrays[0])
    cts = np.array([c.C, c.C[::-1], 2 * c.C])
    yield c.native.vmap(lambda ct: pullback(ct)[0])(c.array(cts)), cts @ c.D[1]


def _vmap_tangents(c: Case) -> Pairs:
    push = lambda dx: c.native.jvp(c.f, c.arrays[:1], (dx,))[1]
    dxs = np.array([c.V, c.W, c.U])
    yield c.native.vmap(push)(c.array(dxs)), dxs @ c.D[1].T


def _vmap_second(c: Case) -> Pairs:
    for api in (c.native, c.gt):
        product = lambda x, api=api: nth(api, "rr", c.loss, x, [c.arrays[2], c.arrays[1]])
        found = c.native.vmap(product)(c.array(c.some))
        yield found, c.each(lambda x: c.W @ c.hessian(x) @ c.V, c.some)


def _vmap_fr(c: Case) -> Pairs:
    product = lambda x: nth(c.native, "fr", c.loss, x, [c.arrays[2], c.arrays[1]])
    yield (
        c.native.vmap(product)(c.array(c.some)),
        c.each(lambda x: c.W @ c.hessian(x) @ c.V, c.some),
    )


def _halves_at(c: Case, xs: np.ndarray, ps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs = [np.concatenate([x, p]) for x, p in zip(xs, ps, strict=True)]
    return c.each(c.value, np.array(pairs)), c.each(c.gradient, np.array(pairs))


def _vmap_partly(c: Case) -> Pairs:
    """Yield results of vmap over one of two arguments, inside and outside of the derivative."""
    assert c.way.halves is not None
    f, ct = c.way.halves(c.gt), c.array(c.C)
    loss = lambda x, p: (f(x, p) * ct).sum()
    x, p = c.X[:3], c.X[3:]
    xs, ps = c.many[:, :3], c.many[:, 3:]
    for axes, first, second in (((0, None), xs, p), ((None, 0), x, ps)):
        value, grads = _halves_at(c, *np.broadcast_arrays(first, second)[:2])
        a, b = c.array(first), c.array(second)
        yield c.native.vmap(f, axes)(a, b), value
        outside = lambda a, b, axes=axes: c.native.vmap(loss, axes)(a, b).sum()
        for argnum, part in ((0, grads[:, :3]), (1, grads[:, 3:])):
            inside = c.native.vmap(c.gt.grad(loss, argnum), axes)
            yield inside(a, b), part
            total = part if axes[argnum] == 0 else part.sum(0)
            yield c.gt.grad(outside, argnum)(a, b), total


# compiled


def _compiled(inner: Callable[[Case], Any], expected: Callable[[Case], Any]) -> Any:
    return lambda c: [(c.native.jit(inner(c))(c.arrays[0]), expected(c))]


def _gradient_at(c: Case) -> Any:
    return c.gradient(c.X)


def _pushed_at(c: Case) -> Any:
    return c.D[1] @ c.V


def _push(api: Any, c: Case) -> Any:
    v = c.arrays[1]
    return lambda x: api.jvp(c.f, (x,), (v,))[1]


def _grad_of_compiled(c: Case) -> Pairs:
    """Yield results of derivatives of a compiled function."""
    loss = c.native.jit(c.loss)
    yield c.gt.grad(loss)(c.arrays[0]), c.gradient(c.X)


def _second_of_compiled(c: Case) -> Pairs:
    loss = c.native.jit(c.loss)
    x, v, w, _ = c.arrays
    yield nth(c.gt, "rr", loss, x, [w, v]), c.W @ c.hessian(c.X) @ c.V


def _second_inside_compiled(mix: str) -> Any:
    def run(c: Case) -> Pairs:
        x, v, w, _ = c.arrays
        loss = c.loss
        found = c.native.jit(lambda x: nth(c.native, mix, loss, x, [w, v]))(x)
        yield found, c.W @ c.hessian(c.X) @ c.V

    return run


def _compiled_vmap_grad(c: Case) -> Pairs:
    found = c.native.jit(c.native.vmap(c.native.grad(c.loss)))(c.array(c.some))
    yield found, c.each(c.gradient, c.some)


# loops, conditions, checkpoints


def _loop_grad(c: Case) -> Pairs:
    total = lambda x: (c.native.loop(c.body, x, 3) * c.arrays[1]).sum()
    x = c.X * 0.5
    yield c.gt.grad(total)(c.array(x)), c.V @ c.loop_at(x, 3)[1]


def _loop_jvp(c: Case) -> Pairs:
    x = c.X * 0.5
    out, pushed = c.gt.jvp(lambda x: c.native.loop(c.body, x, 3), (c.array(x),), (c.array(c.W),))
    yield out, c.loop_at(x, 3)[0]
    yield pushed, c.loop_at(x, 3)[1] @ c.W


def _loop_second(mix: str) -> Any:
    def run(c: Case) -> Pairs:
        total = lambda x: (c.native.loop(c.body, x, 2) * c.arrays[3]).sum()
        x = c.X * 0.5
        found = nth(c.gt, mix, total, c.array(x), [c.arrays[2], c.arrays[1]])
        yield found, np.einsum("i,ijk,j,k", c.U, c.loop_at(x, 2)[2], c.W, c.V)

    return run


def _while_jvp(c: Case) -> Pairs:
    x = c.X * 0.5
    out, pushed = c.gt.jvp(
        lambda x: c.native.while_loop(c.body, x, 2), (c.array(x),), (c.array(c.W),)
    )
    yield out, c.loop_at(x, 2)[0]
    yield pushed, c.loop_at(x, 2)[1] @ c.W


def _cond(c: Case) -> Pairs:
    for which in (True, False):
        f = lambda x, which=which: c.native.cond(which, c.loss, lambda x: x.sum(), x)
        expected = c.gradient(c.X) if which else np.ones_like(c.X)
        yield c.gt.grad(f)(c.arrays[0]), expected
        yield c.gt.jvp(f, c.arrays[:1], c.arrays[1:2])[1], expected @ c.V


def _checkpoint(mix: str, own: bool) -> Any:
    def run(c: Case) -> Pairs:
        f = c.gt.checkpoint(c.loss) if own else c.native.checkpoint(c.loss)
        x, v, w, _ = c.arrays
        if mix == "r":
            yield c.gt.grad(f)(x), c.gradient(c.X)
        else:
            yield nth(c.gt, mix, f, x, [w, v]), c.W @ c.hessian(c.X) @ c.V

    return run


_DERIVED = (
    *[Transform(f"gt second order {m}", 2, _order(m, _own)) for m in MIXES],
    *[Transform(f"native second order {m}", 2, _order(m, _native)) for m in MIXES],
    *[Transform(f"gt third order {m}", 3, _order(m, _own)) for m in THIRD_MIXES],
    *[Transform(f"native third order {m}", 3, _order(m, _native)) for m in THIRD_MIXES],
)

BOTH = (
    Transform("value", 0, lambda c: [(c.f(c.arrays[0]), c.D[0])]),
    Transform("gt.grad", 1, _grad),
    Transform("gt.vjp", 1, _vjp(_own)),
    Transform("gt.jvp", 1, _jvp(_own)),
    Transform("gt.linearize", 1, _linearize),
    Transform("gt.jacobian reverse", 1, _jacobian("reverse")),
    Transform("gt.jacobian forward", 1, _jacobian("forward")),
    Transform("gt.per_example_grad", 1, _per_example),
    Transform("native grad", 1, lambda c: [(c.native.grad(c.loss)(c.arrays[0]), c.gradient(c.X))]),
    Transform("native vjp", 1, _vjp(_native)),
    Transform("native jvp", 1, _jvp(_native)),
    Transform("gt.hvp fr", 2, _hvp("forward_over_reverse")),
    Transform("gt.hvp rr", 2, _hvp("reverse_over_reverse")),
    Transform("gt.hessian", 2, lambda c: [(c.gt.hessian(c.loss)(c.arrays[0]), c.hessian(c.X))]),
    *_DERIVED,
    Transform("vmap(value)", 0, _vmap_value),
    Transform("vmap(grad)", 1, _vmap_grad),
    Transform("grad(vmap)", 1, _grad_vmap),
    Transform("vmap(jvp)", 1, _vmap_jvp),
    Transform("jvp(vmap)", 1, _jvp_vmap),
    Transform("vmap(vmap(value))", 0, _vmap_vmap),
    Transform("vmap(vmap(grad))", 1, _vmap_vmap_grad),
    Transform("vmap of cotangents", 1, _vmap_cotangents),
    Transform("vmap of tangents", 1, _vmap_tangents),
    Transform("vmap(second order rr)", 2, _vmap_second),
    Transform("vmap(second order fr)", 2, _vmap_fr),
    Transform("vmap, one argument shared", 1, _vmap_partly, halves=True),
    Transform("compiled value", 0, _compiled(lambda c: c.f, lambda c: c.D[0])),
    Transform("compiled gt.grad", 1, _compiled(lambda c: c.gt.grad(c.loss), _gradient_at)),
    Transform(
        "compiled native grad",
        1,
        _compiled(lambda c: c.native.grad(c.loss), _gradient_at),
    ),
    Transform("compiled gt.jvp", 1, _compiled(lambda c: _push(c.gt, c), _pushed_at)),
    Transform("compiled native jvp", 1, _compiled(lambda c: _push(c.native, c), _pushed_at)),
    Transform("grad of a compiled value", 1, _grad_of_compiled),
    Transform("compiled vmap(grad)", 1, _compiled_vmap_grad),
    Transform("compiled second order rr", 2, _second_inside_compiled("rr")),
    Transform("compiled second order fr", 2, _second_inside_compiled("fr")),
    Transform("second order of a compiled value", 2, _second_of_compiled),
    Transform("grad of a loop", 1, _loop_grad),
    Transform("jvp of a loop", 1, _loop_jvp),
    Transform("second order rr of a loop", 2, _loop_second("rr")),
    Transform("second order fr of a loop", 2, _loop_second("fr")),
    Transform("jvp of a while loop", 1, _while_jvp),
    Transform("grad and jvp of a condition", 1, _cond),
    Transform("grad of gt.checkpoint", 1, _checkpoint("r", True)),
    Transform("second order rr of gt.checkpoint", 2, _checkpoint("rr", True)),
    Transform("grad of native checkpoint", 1, _checkpoint("r", False)),
    Transform("second order rr of native checkpoint", 2, _checkpoint("rr", False)),
)
