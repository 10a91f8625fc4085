"""Defines transforms of JAX itself for functions with custom rules; see `support_transforms`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from tests.conformance.support_transforms import Case, Pairs, Transform, nth


def _linearize(c: Case) -> Pairs:
    out, push = jax.linearize(c.f, c.arrays[0])
    yield out, c.D[0]
    yield push(c.arrays[1]), c.D[1] @ c.V


def _linear_transpose(c: Case) -> Pairs:
    """The transpose of the linear pushforward is J^T, without conjugation."""
    _, push = jax.linearize(c.f, c.arrays[0])
    yield jax.linear_transpose(push, c.arrays[0])(c.array(c.C))[0], c.gradient(c.X)
    pushed = lambda dx: jax.jvp(c.f, c.arrays[:1], (dx,))[1]
    yield jax.linear_transpose(pushed, c.arrays[0])(c.array(c.C))[0], c.gradient(c.X)


def _jacobian(which: Any) -> Any:
    return lambda c: [(which(c.f)(c.arrays[0]), c.D[1])]


def _compiled_scan(c: Case) -> Pairs:
    total = lambda x: (c.native.loop(c.body, x, 3) * c.arrays[1]).sum()
    x = c.X * 0.5
    yield jax.jit(jax.grad(total))(c.array(x)), c.V @ c.loop_at(x, 3)[1]


def _vmapped_scan(c: Case) -> Pairs:
    f = lambda x: c.native.loop(c.body, x, 2)
    xs = c.some * 0.5
    out, push = jax.linearize(jax.vmap(f), c.array(xs))
    yield out, np.array([c.loop_at(x, 2)[0] for x in xs])
    yield (
        push(c.array(c.some)),
        np.array([c.loop_at(x, 2)[1] @ d for x, d in zip(xs, c.some, strict=True)]),
    )


def _fori(c: Case) -> Pairs:
    x = c.X * 0.5
    run = lambda x: jax.lax.fori_loop(0, 2, lambda _, x: c.body(x), x)
    yield jax.jvp(run, (c.array(x),), (c.array(c.W),))[1], c.loop_at(x, 2)[1] @ c.W
    total = lambda x: (run(x) * c.arrays[1]).sum()
    yield jax.grad(total)(c.array(x)), c.V @ c.loop_at(x, 2)[1]


def _remat(c: Case) -> Pairs:
    f = jax.checkpoint(c.loss, policy=jax.checkpoint_policies.nothing_saveable)
    yield jax.jit(jax.grad(f))(c.arrays[0]), c.gradient(c.X)
    f = jax.checkpoint(c.loss, policy=jax.checkpoint_policies.everything_saveable)
    yield jax.grad(f)(c.arrays[0]), c.gradient(c.X)


def _remat_fr(c: Case) -> Pairs:
    x, v, w, _ = c.arrays
    found = nth(jax, "fr", jax.checkpoint(c.loss), x, [w, v])
    yield found, c.W @ c.hessian(c.X) @ c.V


def _mesh() -> Any:
    n = max(n for n in (1, 2, 4) if n <= len(jax.devices()))
    return jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def _shard(c: Case, check: bool, order: int) -> Pairs:
    def mapped(f: Any) -> Any:
        return jax.jit(
            jax.shard_map(f, mesh=_mesh(), in_specs=P("i"), out_specs=P("i"), check_vma=check)
        )

    many = c.array(c.many)
    if order == 0:
        yield mapped(jax.vmap(c.f))(many), c.each(c.value, c.many)
    if order == 1:
        yield mapped(jax.vmap(jax.grad(c.loss)))(many), c.each(c.gradient, c.many)
        total = lambda xs: mapped(jax.vmap(c.loss))(xs).sum()
        yield jax.grad(total)(many), c.each(c.gradient, c.many)
        push = jax.vmap(lambda x: jax.jvp(c.f, (x,), c.arrays[1:2])[1])
        yield mapped(push)(many), c.each(lambda x: c.jacobian(x) @ c.V, c.many)
    if order == 2:
        second = lambda mix: lambda x: nth(jax, mix, c.loss, x, [c.arrays[2], c.arrays[1]])
        for mix in ("rr", "fr"):
            found = mapped(jax.vmap(second(mix)))(many)
            yield found, c.each(lambda x: c.W @ c.hessian(x) @ c.V, c.many)


def _shard_shared(c: Case, check: bool) -> Pairs:
    """The second argument is replicated, so its cotangent is summed over the devices."""
    assert c.way.halves is not None
    f, ct = c.way.halves(c.gt), c.array(c.C)
    xs, p = c.many[:, :3], c.X[3:]
    loss = lambda xs, p: jax.vmap(lambda x: (f(x, p) * ct).sum())(xs)
    everywhere = c.each(c.gradient, np.array([np.concatenate([x, p]) for x in xs]))

    def run(g: Any, out: Any) -> Any:
        specs = (P("i"), P())
        return jax.jit(
            jax.shard_map(g, mesh=_mesh(), in_specs=specs, out_specs=out, check_vma=check)
        )(c.array(xs), c.array(p))

    outside = lambda xs, p: jax.shard_map(
        loss, mesh=_mesh(), in_specs=(P("i"), P()), out_specs=P("i"), check_vma=check
    )(xs, p).sum()
    of_xs, of_p = jax.grad(outside, (0, 1))(c.array(xs), c.array(p))
    yield of_xs, everywhere[:, :3]
    yield of_p, everywhere[:, 3:].sum(0)
    inside = lambda xs, p: jax.grad(lambda p: loss(xs, p).sum())(p)
    if check:
        yield run(inside, P()), everywhere[:, 3:].sum(0)
    else:
        summed = lambda xs, p: jax.lax.psum(inside(xs, p), "i")
        yield run(summed, P()), everywhere[:, 3:].sum(0)


def _solution(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the solution y of y + B(y) = x and dy/dx at x = 0.3 X, where B is the loop's body."""
    y = np.zeros_like(c.X)
    for _ in range(200):
        value, jacobian, _ = c.body_at(y)
        y = y - np.linalg.solve(np.eye(len(y)) + jacobian, y + value - 0.3 * c.X)
    return y, np.linalg.inv(np.eye(len(y)) + c.body_at(y)[1])


def _custom_root(c: Case) -> Pairs:
    y, inverse = _solution(c)
    start = c.array(y)

    def solve(g: Any, _: Any) -> Any:
        return start

    def tangent_solve(g: Any, b: Any) -> Any:
        columns = jax.vmap(g)(jnp.eye(len(c.X))).T
        return jnp.linalg.solve(columns, b)

    def root(x: Any) -> Any:
        return jax.lax.custom_root(lambda y: y + c.body(y) - x, start, solve, tangent_solve)

    x = c.array(0.3 * c.X)
    yield root(x), y
    yield jax.grad(lambda x: (root(x) * c.arrays[1]).sum())(x), c.V @ inverse
    yield jax.jvp(root, (x,), (c.arrays[2],))[1], inverse @ c.W


def _custom_linear_solve(c: Case) -> Pairs:
    """Solve (I + J(x)) y = b, where the matrix is available only through the pushforward."""
    eye = np.eye(c.way.size)
    matrix = eye + c.body_at(c.X)[1]

    def solve(x: Any, b: Any) -> Any:
        _, push = jax.linearize(c.body, x)
        product = lambda v: v + push(v)
        dense = lambda g, b: jnp.linalg.solve(jax.vmap(g)(jnp.eye(len(b))).T, b)
        return jax.lax.custom_linear_solve(product, b, dense, dense)

    x, b = c.arrays[:2]
    yield solve(x, b), np.linalg.solve(matrix, c.V)
    yield jax.grad(lambda b: (solve(x, b) * c.arrays[2]).sum())(b), np.linalg.solve(matrix.T, c.W)


def _export(order: int) -> Any:
    def run(c: Case) -> Pairs:
        f = jax.jit(c.f if order == 0 else jax.grad(c.loss))
        exported = jax.export.export(f)(c.arrays[0])
        # JAX serializes exports with flatbuffers, which is an optional dependency
        if find_spec("flatbuffers") is not None:
            exported = jax.export.deserialize(exported.serialize())
        yield exported.call(c.arrays[0]), c.D[0] if order == 0 else c.gradient(c.X)

    return run


def _lower(order: int) -> Any:
    def run(c: Case) -> Pairs:
        f = (c.f, jax.grad(c.loss), jax.jacfwd(jax.grad(c.loss)))[order]
        lowered = jax.jit(f).trace(c.arrays[0]).lower(lowering_platforms=("cpu", "cuda", "tpu"))
        yield float("func.func public @main" in lowered.as_text()), 1.0

    return run


def _check_grads(order: int) -> Any:
    def run(c: Case) -> Pairs:
        check_grads(c.f, c.arrays[:1], order=order, modes=("fwd", "rev"), rtol=1e-4, atol=1e-4)
        yield 1.0, 1.0

    return run


def _sharded(order: int, check: bool) -> Any:
    return lambda c: _shard(c, check, order)


def _shared(check: bool) -> Any:
    return lambda c: _shard_shared(c, check)


def _row(name: str, order: int, run: Any, **more: Any) -> Transform:
    return Transform(name, order, run, backend="jax", **more)


_CHECKS = (False, True)
JAX = (
    _row("jax.linearize", 1, _linearize),
    _row("jax.linear_transpose", 1, _linear_transpose),
    _row("jax.jacfwd", 1, _jacobian(jax.jacfwd)),
    _row("jax.jacrev", 1, _jacobian(jax.jacrev)),
    _row("jax.hessian", 2, lambda c: [(jax.hessian(c.loss)(c.arrays[0]), c.hessian(c.X))]),
    _row("jit(grad(scan))", 1, _compiled_scan),
    _row("linearize(vmap(scan))", 1, _vmapped_scan),
    _row("fori_loop", 1, _fori),
    _row("checkpoint with a policy", 1, _remat),
    _row("second order fr of checkpoint", 2, _remat_fr),
    *[
        _row(f"shard_map, check_vma={check}, order {order}", order, run)
        for check in _CHECKS
        for order in range(3)
        for run in (_sharded(order, check),)
    ],
    *[
        _row(
            f"shard_map, check_vma={check}, one argument shared",
            1,
            _shared(check),
            halves=True,
        )
        for check in _CHECKS
    ],
    _row("custom_root", 1, _custom_root),
    _row("custom_linear_solve", 1, _custom_linear_solve),
    _row("export of the value", 0, _export(0)),
    _row("export of the gradient", 1, _export(1)),
    *[
        _row(f"lowering for cpu, cuda and tpu, order {order}", order, _lower(order))
        for order in range(3)
    ],
    *[_row(f"check_grads, order {order}", order, _check_grads(order)) for order in (1, 2, 3)],
)
