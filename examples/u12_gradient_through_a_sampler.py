"""Passes the gradient at an intermediate value through a random sampler in the backward pass.

For the cost g(h(x)), the cotangent of h's output is multiplied by a Bernoulli mask, with one key
per example, and divided by the rate, which preserves the mean. Alternatively, a known gradient
replaces the cotangent. The result is then pulled back to the parameters and summed over the batch,
in the same backward pass.
"""

import numpy as np
from common import claim, difference, flat, main
from sklearn.datasets import load_digits
from tqdm import trange

RATE, DRAWS, BATCH = 0.5, 400, 32


def show(gt, backend):
    xp = gt.xp
    images, classes = load_digits(return_X_y=True)
    x, labels = gt.asarray(images[:BATCH] / 16), gt.asarray(np.eye(10)[classes[:BATCH]])
    rng = np.random.default_rng(0)
    params = {"w": gt.asarray(rng.normal(scale=0.1, size=(64, 16))), "b": gt.asarray(np.zeros(16))}
    head = gt.asarray(rng.normal(scale=0.5, size=(16, 10)))
    draw = {"torch": bernoulli_torch, "jax": bernoulli_jax}[backend]

    h = lambda params: xp.tanh(x @ params["w"] + params["b"])

    def g(features):
        logits = features @ head
        return xp.mean(xp.log(xp.sum(xp.exp(logits), axis=1)) - xp.sum(logits * labels, axis=1))

    def masks(key):
        return draw(gt.split_key(key, BATCH), 16) / RATE  # a key for each example

    def sampled(params, key):
        through = lambda cotangent: cotangent * masks(key)
        return gt.grad(lambda p: g(gt.transform_gradient(h(p), through)))(params)

    def two_stages(params, key):
        features, pullback = gt.vjp(h, params)
        return pullback(gt.grad(g)(features) * masks(key))[0]

    if backend == "jax":
        sampled = gt.compile(sampled)
    key = gt.random_key(0)
    apart = difference(flat(gt, sampled(params, key)), flat(gt, two_stages(params, key)))
    claim(f"one pass with the sampler differs from two passes by {apart:.1e}", apart < 1e-12)

    known = gt.asarray(rng.normal(size=(BATCH, 16)) / BATCH)
    replaced = gt.grad(lambda p: g(gt.replace_gradient(h(p), known)))(params)
    by_hand = gt.vjp(h, params)[1](known)[0]
    apart = difference(flat(gt, replaced), flat(gt, by_hand))
    claim(f"the replaced gradient differs from a manual pullback by {apart:.1e}", apart < 1e-12)

    plain = gt.grad(lambda p: g(h(p)))(params)
    keys = gt.split_key(gt.random_key(1), DRAWS)
    draws = np.stack(
        [
            flat(gt, sampled(params, keys[i]))
            for i in trange(DRAWS, desc="  draws", leave=False, disable=None)
        ]
    )
    off = np.linalg.norm(draws.mean(axis=0) - flat(gt, plain))
    expected = np.sqrt(draws.var(axis=0, ddof=1).sum() / DRAWS)
    claim(
        f"the mean of {DRAWS} draws differs from the plain gradient by {off:.4f}; "
        f"the standard error is {expected:.4f}",
        off < 1.5 * expected,
    )
    return {"plain": plain, "replaced": replaced}


def bernoulli_torch(keys, n):
    import torch

    rate = torch.full((n,), RATE, dtype=torch.float64)
    generators = [torch.Generator().manual_seed(int(key[0])) for key in keys]
    return torch.stack([torch.bernoulli(rate, generator=each) for each in generators])


def bernoulli_jax(keys, n):
    import jax

    return jax.vmap(lambda key: jax.random.bernoulli(key, RATE, (n,)).astype("float64"))(keys)


if __name__ == "__main__":
    main(show)
