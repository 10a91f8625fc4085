"""What `pairwise_reduce` costs: operations by formula, bytes flat in the number of columns."""

from __future__ import annotations

import numpy as np
import pytest

TILE, D = 64, 32


def contrast(gt, tile=TILE):
    run = gt.pairwise_reduce(lambda x, y: x @ y.T, "logsumexp", tile)
    return lambda x, y: gt.xp.sum(run(x, y))


def features(gt, n, m):
    rng = np.random.default_rng(0)
    return [gt.asarray(rng.normal(size=(k, D)).astype(np.float32)) for k in (n, m)]


def matmuls(gt, backend_name, f, *args):
    """The flops of matrix products alone, each 2 n m d, loops times their trips."""
    if backend_name == "torch":
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            f(*args)
        return counter.get_total_flops()
    import jax

    return _dots(jax.make_jaxpr(f)(*args).jaxpr)


def _dots(jaxpr, times=1):
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            out, left = eqn.outvars[0].aval, eqn.invars[0].aval
            contracted = eqn.params["dimension_numbers"][0][0]
            total += 2 * times * out.size * int(np.prod([left.shape[i] for i in contracted]))
        inner = getattr(eqn.primitive, "gradtools_program", None)
        trips = times * eqn.params.get("length", 1)
        if inner is not None:
            total += _dots(inner(eqn).jaxpr, times)
            continue
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else [value]:
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    total += _dots(sub, trips)
    return total


@pytest.mark.slow_at("256-256", "jax")
@pytest.mark.sweep_at(("jax", "256-256"))
@pytest.mark.parametrize(("n", "m"), [(256, 256), (192, 320)])
def test_a_value_takes_one_product_and_a_gradient_three_more(n, m, gt, backend_name):
    x, y = features(gt, n, m)
    once = 2 * n * m * D
    assert matmuls(gt, backend_name, contrast(gt), x, y) == once
    slope = gt.grad(contrast(gt), argnums=(0, 1))
    assert matmuls(gt, backend_name, slope, x, y) == 4 * once


def peak(gt, backend_name, f, *args):
    """Bytes beyond the arguments."""
    if backend_name == "torch":
        from gradtools.torch.live_bytes import LiveBytes

        with LiveBytes() as live:
            f(*args)
        return live.peak
    import jax

    found = jax.jit(f).lower(*args).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


WAYS = {
    "gradient": lambda gt, f: gt.grad(f, argnums=0),
    "Hessian product": lambda gt, f: lambda x, y: gt.hvp(lambda x: f(x, y), (x,), (x,))[1],
    "jvp": lambda gt, f: lambda x, y: gt.jvp(lambda x: f(x, y), (x,), (x,))[1],
}


@pytest.mark.sweep_at("torch", "gradient", "Hessian product")
@pytest.mark.parametrize("way", WAYS)
def test_bytes_do_not_grow_with_the_number_of_columns(way, gt, backend_name):
    def taken(columns):
        return peak(gt, backend_name, WAYS[way](gt, contrast(gt)), *features(gt, 128, columns))

    few, many = taken(256), taken(4096)
    # In JAX what is cut into blocks may be copied once, as the columns themselves are large; in
    # PyTorch the columns' own numbers are counted, four bytes each.
    more = {"torch": 4 * (4096 - 256), "jax": 2 * 4096 * D * 4}[backend_name]
    assert many <= 1.1 * few + more
    assert many < 4 * 128 * 4096  # less than a single matrix of pairs


@pytest.mark.sweep_at("jax")
def test_a_budget_bounds_the_bytes(gt, backend_name):
    x, y = features(gt, 512, 512)
    run = gt.pairwise_reduce(lambda x, y: x @ y.T, "logsumexp", memory_budget=2**17)
    taken = peak(gt, backend_name, gt.grad(lambda x, y: gt.xp.sum(run(x, y))), x, y)
    assert taken < 2**18 + 3 * 512 * D * 4


@pytest.mark.slow
def test_the_parts_of_a_derivative_are_let_go_as_they_are_joined():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt
    from gradtools.torch.live_bytes import LiveBytes

    x, y = (z.requires_grad_() for z in torch.randn(2, 32 * TILE, D))
    loss = contrast(gt)(x, y)
    with LiveBytes() as live:
        torch.autograd.grad(loss, (x, y))
    small = 6 * TILE * TILE * x.element_size()
    assert live.peak < 3 * x.nbytes + small  # both gradients, of one its parts beside it
