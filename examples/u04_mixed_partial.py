"""Computes (d/dy) <u, (d/dz) f(y, G(z))> for a known u, with memory constant in G's depth.

With w = J_G u the inner product is <w, (d/dg) f(y, g)> at g = G(z). Computing w needs one
forward-mode pass through G and no graph. Double backward keeps the whole graph of G.
"""

import numpy as np
from common import claim, difference, flat, main

import gradtools

DEPTHS, WIDTH, BATCH = (6, 24), 64, 256


def show(gt, backend):
    small = section_by_hand(gt)
    memory = {"torch": saved_bytes, "jax": compiled_bytes}[backend]
    G = {"torch": deep_torch, "jax": deep_jax}[backend]
    rng = np.random.default_rng(0)
    z, u = (gt.asarray(rng.normal(size=(BATCH, WIDTH))) for _ in range(2))
    y = gt.asarray(rng.normal(size=WIDTH))
    f = lambda y, g: gt.xp.mean(gt.xp.tanh(g @ y) ** 2)

    bytes_of, results, weights = {}, {}, None
    for depth in DEPTHS:
        weights = gt.asarray(rng.normal(size=(depth, WIDTH, WIDTH)) / WIDTH**0.5)

        def ours(y, z, u, weights):
            return gt.mixed_partial(f, lambda z: G(z, weights), y, z, u)

        def double_backward(y, z, u, weights):
            slope = lambda y: gt.grad(lambda z: f(y, G(z, weights)))(z)
            return gt.grad(lambda y: (u * slope(y)).sum())(y)

        for way in (ours, double_backward):
            result, bytes_of[way.__name__, depth] = memory(way, y, z, u, weights)
            results[way.__name__, depth] = flat(gt, result)
    for depth in DEPTHS:
        kept, plain = bytes_of["ours", depth], bytes_of["double_backward", depth]
        print(
            f"  {depth:2} layers: mixed_partial {kept / 1e6:.2f} MB, double backward "
            f"{plain / 1e6:.2f} MB"
        )
    shallow, deep = DEPTHS
    apart = max(difference(results["ours", d], results["double_backward", d]) for d in DEPTHS)
    claim(f"the results of both methods differ by {apart:.1e}", apart < 1e-12)
    claim(
        "mixed_partial's memory does not grow with the depth",
        bytes_of["ours", deep] == bytes_of["ours", shallow],
    )
    claim(
        "double backward's memory grows with the depth",
        bytes_of["double_backward", deep] > 2 * bytes_of["double_backward", shallow],
    )
    the_wrong_way(gt, f, lambda z: G(z, weights), y, z)
    return {"small": small, **{f"deep {d}": gt.asarray(results["ours", d]) for d in DEPTHS}}


def section_by_hand(gt):
    """Compares the mixed partial of a small function with its closed form.

    For f = sum((sum_j y_j + g)^3), G = exp(sum_j z_j) and u = 1, row i of the result is 24 h_i g_i
    with h_i = sum_j y_ij + g_i.
    """
    xp = gt.xp
    y, z = (np.random.default_rng(1).normal(scale=0.3, size=(3, 4)) for _ in range(2))
    f = lambda y, g: xp.sum((xp.sum(y, axis=1) + g) ** 3)
    G = lambda z: xp.exp(xp.sum(z, axis=1))
    found = gt.mixed_partial(f, G, gt.asarray(y), gt.asarray(z), gt.asarray(np.ones((3, 4))))
    g = np.exp(z.sum(axis=1))
    by_hand = np.repeat(24 * (y.sum(axis=1) + g) * g, 4)
    apart = difference(flat(gt, found), by_hand)
    claim(f"mixed_partial differs from the closed form by {apart:.1e}", apart < 1e-12)
    return found


def the_wrong_way(gt, f, G, y, z):
    """Shows that d/dz fails if G(z) is computed without a graph to save memory."""
    try:
        gt.grad(lambda z: f(y, gt.stop_gradient(G(z))))(z)
        claim("without the graph of G, d/dz raises an error", False)
    except gradtools.DisconnectedInputError as error:
        claim(f"without the graph of G, d/dz raises an error: {str(error).split('.')[0]}", True)


def deep_torch(z, weights):
    for weight in weights:
        z = (z @ weight).tanh()
    return z


def deep_jax(z, weights):
    import jax

    return jax.lax.scan(lambda z, w: (jax.numpy.tanh(z @ w), None), z, weights)[0]


def saved_bytes(way, *args):
    """Returns the result, and the bytes that autograd saves in addition to the inputs."""
    import torch

    kept = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in args}
    inputs = set(kept)

    def pack(x):
        kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = way(*args)
    return result, sum(s.nbytes() for at, s in kept.items() if at not in inputs)


def compiled_bytes(way, *args):
    """Returns the result of the compiled program, and its temporary bytes."""
    import jax

    compiled = jax.jit(way).lower(*args).compile()
    return compiled(*args), compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main(show)
