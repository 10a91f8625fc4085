"""Trains a MeanFlow model, which generates digits in one step, with ``gt.jvp`` in the loss.

On the path z = (1 - t) x + t e from a digit x to noise e the velocity is v = e - x. MeanFlow (Geng
et al., Mean flows for one-step generative modeling, 2025) learns u(z, r, t), the mean velocity from
r to t, which satisfies

    u = v - (t - r) du/dt        du/dt = the derivative of u along (v, 0, 1)

The loss therefore contains a Jacobian-vector product of the network, which one forward pass
computes together with the value. The loss is differentiated with respect to the parameters; the
product is treated as a constant. One evaluation at noise e then generates a digit: x = e - u(e, 0,
1). A nearest-neighbor classifier labels the generated digits, and a picture of these digits is
written to ``out/``.
"""

from pathlib import Path

import numpy as np
from common import claim, main
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from tqdm import trange

WIDTH, LAYERS, STEPS, BATCH, RATE = 128, 2, 500, 96, 4e-3
PIXELS, CLASSES, FREQUENCIES = 64, 10, np.array([1.0, 2.0, 4.0, 8.0])


def show(gt, backend):
    xp = gt.xp
    images, labels = digits()
    frequencies = gt.asarray(FREQUENCIES)

    def u(params, z, r, t, label):
        """Returns the mean velocity from r to t at z, on the path to a digit with this label."""
        angles = [r * frequencies, (t - r) * frequencies]
        parts = [z, label, *map(xp.sin, angles), *map(xp.cos, angles)]
        h = swish(xp, xp.concat(parts, axis=1) @ params["in"] + params["in bias"])
        for k in range(LAYERS):
            h = h + swish(xp, h @ params[f"layer {k}"] + params[f"bias {k}"])
        return h @ params["out"]

    def loss(params, x, e, r, t, label):
        z, v = (1 - t) * x + t * e, e - x
        along = (v, xp.zeros_like(r), xp.ones_like(t))
        mean, slope = gt.jvp(lambda z, r, t: u(params, z, r, t, label), (z, r, t), along)
        target = gt.stop_gradient(v - (t - r) * slope)
        errors = xp.mean((mean - target) ** 2, axis=1)
        return xp.mean(errors / (gt.stop_gradient(errors) + 0.01))

    def step(state, rate, *batch):
        """Applies one step of Adam."""
        params, mean, square = state
        value, grads = gt.value_and_grad(loss)(params, *batch)
        mean = {k: 0.9 * m + 0.1 * grads[k] for k, m in mean.items()}
        square = {k: 0.99 * s + 0.01 * grads[k] ** 2 for k, s in square.items()}
        move = lambda k: rate * mean[k] / (xp.sqrt(square[k]) + 1e-8)
        return value, ({k: p - move(k) for k, p in params.items()}, mean, square)

    def drawn(params, noise, label):
        """Generates digits in one step from noise, with t = 1 and r = 0."""
        r, t = (gt.asarray(np.full((len(noise), 1), end)) for end in (0.0, 1.0))
        return noise - u(params, noise, r, t, label)

    random = np.random.default_rng(0)
    params = {name: gt.asarray(x) for name, x in initial(random).items()}
    zeros = {name: xp.zeros_like(x) for name, x in params.items()}
    first = gt.value_and_grad(loss)(params, *map(gt.asarray, batch_of(images, labels, random)))
    run = gt.compile(step) if backend == "jax" else step
    state = params, zeros, zeros
    for k in trange(STEPS, desc="  steps", leave=False, disable=None):
        rate = RATE * min(1, (k + 1) / 50) * (1 + np.cos(np.pi * k / STEPS)) / 2
        batch = map(gt.asarray, batch_of(images, labels, random))
        _, state = run(state, gt.asarray(np.array(rate)), *batch)

    wanted = np.arange(400) % CLASSES
    noise = gt.asarray(random.normal(size=(len(wanted), PIXELS)))
    one_hot = gt.asarray(np.eye(CLASSES)[wanted])
    reads = KNeighborsClassifier(5).fit(images, labels)
    before, after = (
        np.clip(gt.to_numpy(drawn(p, noise, one_hot)), -1, 1) for p in (params, state[0])
    )
    right = [np.mean(reads.predict(x) == wanted) for x in (before, after)]
    claim(
        f"share of generated digits with the requested label: {right[0]:.0%} before training, "
        f"{right[1]:.0%} after {STEPS} steps",
        right[1] > 0.8,
    )
    spread = np.mean([after[wanted == c].std(0).mean() for c in range(CLASSES)])
    real = np.mean([images[labels == c].std(0).mean() for c in range(CLASSES)])
    claim(
        f"standard deviation within a class: generated {spread:.2f}, real {real:.2f}",
        spread > real / 2,
    )
    print(f"  picture: {picture(after, images, labels, backend)}")
    return {"loss and gradient at the start": first}


def swish(xp, x):
    return x / (1 + xp.exp(-x))


def digits():
    """Returns images of 64 pixels in [-1, 1], and their labels."""
    data = load_digits()
    return data.images.reshape(-1, PIXELS) / 8 - 1, data.target


def initial(random):
    size = PIXELS + CLASSES + 4 * len(FREQUENCIES)
    matrix = lambda n, m: random.normal(size=(n, m)) / np.sqrt(n)
    layers = {f"layer {k}": matrix(WIDTH, WIDTH) for k in range(LAYERS)}
    biases = {name: np.zeros(WIDTH) for name in ("in bias", *(f"bias {k}" for k in range(LAYERS)))}
    return {"in": matrix(size, WIDTH), **layers, **biases, "out": 0.1 * matrix(WIDTH, PIXELS)}


def batch_of(images, labels, random):
    """Returns digits, noise, times r and t with r <= t (equal in half of the rows), and labels."""
    rows = random.integers(0, len(images), BATCH)
    times = 1 / (1 + np.exp(0.4 - random.normal(size=(BATCH, 2))))
    t = times.max(axis=1)
    r = np.where(random.random(BATCH) < 0.5, times.min(axis=1), t)
    noise = random.normal(size=(BATCH, PIXELS))
    return images[rows], noise, r[:, None], t[:, None], np.eye(CLASSES)[labels[rows]]


def picture(drawn, images, labels, backend):
    """Draws generated digits above real digits, in one column per class; returns the path."""
    from matplotlib import pyplot

    real = np.concatenate([images[labels == c][:4] for c in range(CLASSES)])
    real = real.reshape(CLASSES, 4, PIXELS).swapaxes(0, 1).reshape(-1, PIXELS)
    rows = np.concatenate([drawn[: 4 * CLASSES], real]).reshape(8, CLASSES, 8, 8)
    figure, axes = pyplot.subplots(8, CLASSES, figsize=(6, 5))
    for image, axis in zip(rows.reshape(-1, 8, 8), axes.flat, strict=True):
        axis.imshow(image, cmap="gray_r", vmin=-1, vmax=1)
        axis.set_axis_off()
    figure.suptitle("MeanFlow, drawn in one step (above) and real digits (below)", fontsize=9)
    path = Path("out") / f"u16_meanflow_{backend}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=70)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    main(show)
