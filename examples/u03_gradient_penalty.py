"""Trains a Wasserstein GAN with a gradient penalty: the loss contains a derivative of the critic.

The data are samples of eight Gaussians on a circle. The critic D(w, x) minimizes

    mean D(fake) - mean D(real) + 10 mean (|dD/dx| - 1)^2

where dD/dx is evaluated at points between real and fake samples (WGAN-GP: Gulrajani et al.,
Improved training of Wasserstein GANs, 2017). ``gt.per_example_grad`` computes dD/dx for each point,
and ``gt.grad`` differentiates the penalty with respect to w. The generator minimizes -mean D(fake).

``gt.frozen`` saves no memory here: it treats parameters as constants, but the critic's parameters
are trained. If the parameters are passed as arguments, their derivatives are exact, but the second
derivative with respect to D's arguments needs a graph of D in any case.
"""

from itertools import pairwise

import numpy as np
from checks import compiled_bytes, live_bytes
from common import claim, difference, flat, main
from tqdm import tqdm

POINTS, STEPS, PENALTY, RATE = 64, 40, 10.0, 0.002
WIDTHS = {"critic": (2, 32, 32, 1), "generator": (4, 32, 32, 2)}


def show(gt, backend):
    players = {name: network(gt, *sizes) for name, sizes in WIDTHS.items()}
    critic, generator = players["critic"], players["generator"]
    D = lambda w, x: gt.xp.sum(apply(gt, w, x))
    steps = [{k: gt.asarray(x) for k, x in draws(seed).items()} for seed in range(STEPS)]

    by_rows, by_sum = (
        gt.value_and_grad(lambda w, fake, d, slopes=slopes: critic_loss(gt, slopes, w, fake, d))(
            critic, apply(gt, generator, steps[0]["noise"]), steps[0]
        )
        for slopes in (slope_of_each(gt, D), lambda w, x: gt.grad(D, argnums=1)(w, x))
    )
    apart = difference(flat(gt, by_rows), flat(gt, by_sum))
    claim(f"per_example_grad and the gradient of the sum differ by {apart:.1e}", apart < 1e-12)

    def step(critic, generator, batch):
        fake = apply(gt, generator, batch["noise"])
        slopes = slope_of_each(gt, D)
        loss = lambda w: critic_loss(gt, slopes, w, gt.stop_gradient(fake), batch)
        value, down = gt.value_and_grad(loss)(critic)
        fool = lambda w: -gt.xp.mean(apply(gt, critic, apply(gt, w, batch["noise"])))
        return value, down, gt.grad(fool)(generator)

    if backend == "jax":
        step = gt.compile(step)
    losses = []
    for batch in tqdm(steps, desc="  steps", leave=False, disable=None):
        value, down, up = step(critic, generator, batch)
        critic, generator = moved(critic, down, 10 * RATE), moved(generator, up, RATE)
        losses.append(float(value))
    norms = [
        float(gt.xp.mean(slope_norms(gt, slope_of_each(gt, D), w, steps[0]["real"])))
        for w in (players["critic"], critic)
    ]
    claim(
        f"|dD/dx| at the data: {norms[0]:.2f} before, {norms[1]:.2f} after {STEPS} steps",
        abs(norms[1] - 1) < abs(norms[0] - 1),
    )
    no_help(gt, backend)
    return {"losses": gt.asarray(np.array(losses)), "gradient": by_rows}


def critic_loss(gt, slopes, w, fake, batch):
    xp = gt.xp
    between = batch["mix"] * batch["real"] + (1 - batch["mix"]) * fake
    penalty = xp.mean((slope_norms(gt, slopes, w, between) - 1) ** 2)
    score = lambda x: xp.mean(apply(gt, w, x))
    return score(fake) - score(batch["real"]) + PENALTY * penalty


def slope_of_each(gt, D):
    """Returns a function that computes dD/dx at each row of x."""
    return gt.per_example_grad(D, argnums=1, in_axes=(None, 0))


def slope_norms(gt, slopes, w, x):
    return gt.xp.sqrt(gt.xp.sum(slopes(w, x) ** 2, axis=-1) + 1e-12)


def no_help(gt, backend):
    """Measures the memory for the gradient of a penalty on 16 layers, with and without frozen."""
    w, x = network(gt, 2, *[64] * 15, 1), gt.asarray(draws(0)["real"])

    def gradient_of_penalty(critic):
        slopes = gt.grad(lambda w, x: gt.xp.sum(critic(w, x)), argnums=1)
        penalty = lambda w, x: gt.xp.mean((slope_norms(gt, slopes, w, x) - 1) ** 2)
        return lambda w, x: gt.grad(penalty)(w, x)

    D = lambda w, x: apply(gt, w, x)
    plain, ours = gradient_of_penalty(D), gradient_of_penalty(gt.frozen(D))  # w is an argument
    apart = difference(flat(gt, ours(w, x)), flat(gt, plain(w, x)))
    claim(f"frozen changes the penalty's gradient by {apart:.1e}", apart < 1e-12)
    kept = {"torch": live_bytes, "jax": compiled_bytes}[backend]
    sizes = [kept(program, w, x) / 1e6 for program in (ours, plain)]
    claim(
        "frozen does not save memory here: frozen {:.2f} MB, double backward {:.2f} MB".format(
            *sizes
        ),
        sizes[0] > 0.9 * sizes[1],
    )


def network(gt, *sizes):
    rng = np.random.default_rng(sum(sizes))
    return {
        f"{name}{k:02}": gt.asarray(x)
        for k, (n, m) in enumerate(pairwise(sizes))
        for name, x in (("w", rng.normal(size=(n, m)) / n**0.5), ("b", np.zeros(m)))
    }


def apply(gt, w, x):
    last = len(w) // 2 - 1
    for k in range(last):
        x = gt.xp.tanh(x @ w[f"w{k:02}"] + w[f"b{k:02}"])
    return x @ w[f"w{last:02}"] + w[f"b{last:02}"]


def draws(seed):
    """Draws samples of eight Gaussians on a circle, generator noise, and mixing weights."""
    rng = np.random.default_rng(seed)
    angle = rng.integers(8, size=POINTS) * np.pi / 4
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {
        "real": circle + rng.normal(scale=0.05, size=(POINTS, 2)),
        "noise": rng.normal(size=(POINTS, 4)),
        "mix": rng.uniform(size=(POINTS, 1)),
    }


def moved(w, grads, rate):
    return {name: w[name] - rate * grads[name] for name in w}


if __name__ == "__main__":
    main(show, tolerance=1e-9)
