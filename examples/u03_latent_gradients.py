"""Trains a critic with gradients at many codes of a frozen decoder, and stores no decoder graph.

G is a convolutional decoder, which this program trains on scikit-learn's digits. f(y, G(z)) is an
energy that a small network with parameters y assigns to images. Each noisy code z_1, ..., z_N is
moved by a gradient step on the energy, z_i - df/dz_i, and a contrastive loss g compares the moved
codes with all clean codes x. The gradient dg/dy that trains y is a second derivative through G at
every z_i.

Plain double backward keeps two graphs of G for each z_i. ``gt.frozen(G)`` computes the same
gradients and keeps no graph. out/frozen.png shows the memory as a function of N and of G's depth.

With --quick the network and the data are smaller, and no picture is drawn.
"""

import functools
import hashlib
import inspect
import os
import sys
from pathlib import Path

import numpy as np
from checks import compiled_bytes, live_bytes
from common import claim, difference, flat, main
from sklearn.datasets import load_digits

QUICK = "--quick" in sys.argv
OUT = Path(__file__).parents[1] / "out"
CODE, CHANNELS = 8, 16  # Sizes of the decoder.
TRAINING = 150 if QUICK else 500  # Training steps of the decoder.
GROUP, NOISE = 8, 0.7  # Number of codes in each z_i, and the scale of their noise.
N, STEPS, RATE = (4, 10, 0.03) if QUICK else (16, 40, 0.03)
COUNTS = (1, 16) if QUICK else (1, 4, 16, 64)
DEPTHS, WIDTH = (4, 24) if QUICK else (4, 12, 24), 64  # Numbers of layers, and their width.
BYTES = {}  # Measurements for the picture: lists indexed by (x axis, backend, method).


def show(gt, backend):
    weights = constants(gt, decoder_weights(gt))
    G = lambda z: decoder(gt, weights, z)
    codes, noisy = (gt.asarray(x) for x in some_codes(weights, gt, N))
    loss = lambda G, y, zs, x: g(gt, latent_gradients(gt, f, G, y, zs), zs, x)

    y = {name: gt.asarray(x) for name, x in critic_weights().items()}
    through = lambda G: compiled(gt, gt.value_and_grad(lambda y: loss(G, y, noisy, codes)))
    gradient, by_double_backward = (through(way(G)) for way in ways(gt).values())
    (_, ours), (_, plain) = gradient(y), by_double_backward(y)
    apart = difference(flat(gt, ours), flat(gt, plain))
    claim(f"dg/dy differs from double backward by {apart:.1e}", apart < 1e-9)

    losses, trained = adam(gradient, y, [()] * STEPS, RATE, "critic")
    print(f"  the loss g went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
    found = [found_own(gt, G, y, noisy, codes) for y in (None, trained)]
    claim(
        f"share of codes whose nearest clean code is their own: {found[0]:.0%} before, "
        f"{found[1]:.0%} after an energy step",
        found[1] > found[0],
    )

    against_uses(gt, backend, weights, y)
    against_depth(gt, backend)
    if not QUICK:
        draw()
    return {"losses": gt.asarray(np.array(losses)), "dg/dy": ours}


# --- the problem, in both frameworks -------------------------------------------------------------


def f(gt, y, images):
    """Returns the sum of the energies of all images."""
    hidden = gt.xp.tanh(gt.xp.reshape(images, (-1, 64)) @ y["w1"] + y["b1"])
    return gt.xp.sum(hidden @ y["w2"])


def g(gt, slopes, zs, x):
    """Returns the contrastive loss between codes after an energy step and clean codes x."""
    xp = gt.xp
    moved, x = xp.reshape(zs - slopes, (-1, CODE)), xp.reshape(x, (-1, CODE))
    logits = moved @ x.T - xp.sum(x**2, axis=1) / 2  # -|moved - x|^2 / 2 up to a constant per row
    own = xp.sum(moved * x, axis=1) - xp.sum(x**2, axis=1) / 2
    return xp.mean(xp.log(xp.sum(xp.exp(logits - own[:, None]), axis=1)))


def latent_gradients(gt, f, G, y, zs, unrolled=False):
    """Computes df/dz_i at each z_i, one after the other."""
    slope = lambda z: gt.grad(lambda z: f(gt, y, G(z)))(z)
    if gt.__name__ == "gradtools.jax" and not unrolled:
        import jax

        return jax.lax.map(slope, zs)
    return gt.xp.stack([slope(z) for z in zs])


def ways(gt):
    return {"frozen": gt.frozen, "double backward": lambda G: G}


def adam(gradient, params, batches, rate, what):
    """Runs Adam; returns the loss of each step, and the final parameters."""
    losses, means = [], {name: (0 * x, 0 * x) for name, x in params.items()}
    for k, batch in enumerate(progress(batches, what), 1):
        value, grads = gradient(params, *batch)
        losses.append(float(value))
        for name, c in grads.items():
            m, v = means[name]
            m, v = means[name] = 0.9 * m + 0.1 * c, 0.99 * v + 0.01 * c**2
            move = m / (1 - 0.9**k) / ((v / (1 - 0.99**k)) ** 0.5 + 1e-8)
            params = {**params, name: params[name] - rate * move}
    return losses, params


def found_own(gt, G, y, noisy, codes):
    """Returns the share of codes that are closest to their own clean code."""
    if y is not None:
        noisy = noisy - latent_gradients(gt, f, G, y, noisy)
    a, b = (gt.to_numpy(x).reshape(-1, CODE) for x in (noisy, codes))
    distances = ((a[:, None] - b) ** 2).sum(axis=2)
    return (distances.argmin(axis=1) == np.arange(len(a))).mean()


# --- the decoder ---------------------------------------------------------------------------------


def decoder(gt, weights, z):
    """Decodes codes to 2 x 2 images, and enlarges them to 8 x 8 by two convolutional layers."""
    xp = gt.xp
    x = xp.reshape(xp.tanh(z @ weights["dense"]), (-1, CHANNELS, 2, 2))
    for name in ("conv1", "conv2"):
        x = xp.repeat(xp.repeat(x, 2, axis=2), 2, axis=3)
        x = xp.tanh(convolve(gt, x, weights[name]))
    return 1 / (1 + xp.exp(-convolve(gt, x, weights["image"])))


def convolve(gt, x, kernel):
    if gt.__name__ == "gradtools.jax":
        import jax

        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")
    import torch

    return torch.nn.functional.conv2d(x, kernel, padding="same")


def constants(gt, weights):
    """Converts weights to arrays; in PyTorch, to frozen parameters of a module."""
    weights = {name: gt.asarray(x.astype(np.float64)) for name, x in weights.items()}
    if gt.__name__ == "gradtools.jax":
        return weights
    import torch

    return torch.nn.ParameterDict(weights).requires_grad_(False)


def encoder(gt, weights, images):
    return gt.xp.tanh(images @ weights["in"]) @ weights["code"]


def start():
    rng = np.random.default_rng(0)
    shapes = {
        "in": (64, 64),
        "code": (64, CODE),
        "dense": (CODE, 4 * CHANNELS),
        "conv1": (CHANNELS, CHANNELS, 3, 3),
        "conv2": (CHANNELS, CHANNELS, 3, 3),
        "image": (1, CHANNELS, 3, 3),
    }
    inputs = {n: s[0] if len(s) == 2 else 9 * s[1] for n, s in shapes.items()}
    return {n: rng.normal(size=s).astype(np.float32) / inputs[n] ** 0.5 for n, s in shapes.items()}


def trained_autoencoder(gt):
    """Trains an encoder and a decoder on the digits in single precision; returns the weights."""
    images = (load_digits().data / 16).astype(np.float32)
    rng = np.random.default_rng(1)

    def loss(weights, images, noise):
        codes = encoder(gt, weights, images)
        decoded = gt.xp.reshape(decoder(gt, weights, codes + noise), (-1, 64))
        return 64 * gt.xp.mean((decoded - images) ** 2) + 0.02 * gt.xp.mean(codes**2)

    def batch():
        chosen = images[rng.integers(len(images), size=64)]
        noise = rng.normal(scale=0.1, size=(64, CODE)).astype(np.float32)
        return gt.asarray(chosen), gt.asarray(noise)

    gradient = compiled(gt, gt.value_and_grad(loss))
    weights = {name: gt.asarray(x) for name, x in start().items()}
    batches = [batch() for _ in range(TRAINING)]
    losses, weights = adam(gradient, weights, batches, 0.003, "decoder")
    print(f"  the decoder was trained: its loss went from {losses[0]:.2f} to {losses[-1]:.2f}")
    return {name: gt.to_numpy(x) for name, x in weights.items()}


@functools.cache
def decoder_weights(gt):
    """Loads the decoder's weights from disk, or trains the decoder and stores the weights."""
    parts = (decoder, convolve, encoder, start, trained_autoencoder, adam)
    sources = "".join(map(inspect.getsource, parts)) + f"{CODE} {CHANNELS} {TRAINING}"
    path = OUT / f"digits-decoder-{hashlib.sha256(sources.encode()).hexdigest()[:12]}.npz"
    if not path.exists():
        weights = trained_autoencoder(gt)
        OUT.mkdir(exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(whole, **weights)
        os.replace(whole, path)
    with np.load(path) as file:
        return dict(file)


def some_codes(weights, gt, count):
    """Returns clean and noisy codes of the first digits, each of shape (count, GROUP, CODE)."""
    images = gt.asarray(load_digits(return_X_y=True)[0][: count * GROUP] / 16)
    codes = gt.to_numpy(encoder(gt, weights, images)).reshape(count, GROUP, CODE)
    return codes, codes + np.random.default_rng(2).normal(scale=NOISE, size=codes.shape)


def critic_weights():
    rng = np.random.default_rng(3)
    return {
        "w1": rng.normal(size=(64, 32)) / 8,
        "b1": np.zeros(32),
        "w2": rng.normal(size=32) / 32**0.5,
    }


# --- memory --------------------------------------------------------------------------------------


def against_uses(gt, backend, weights, y):
    """Measures the memory of dg/dy through the decoder, for N codes z_i."""
    step = lambda way, n: bytes_of(
        gt, backend, way, decoder, f, weights, y, codes_like(n, GROUP, CODE)
    )
    for n in COUNTS:
        for name, way in ways(gt).items():
            note("N", backend, name, step(way, n))
        sizes = [x[-1] / 1e6 for x in noted("N", backend)]
        print("  N = {:2}: frozen {:.2f} MB, double backward {:.2f} MB".format(n, *sizes))
    ours, plain = ((x[-1] - x[-2]) / (COUNTS[-1] - COUNTS[-2]) / 1e6 for x in noted("N", backend))
    text = f"each additional z_i needs {ours:.3f} MB, with double backward {plain:.3f} MB"
    claim(text, 5 * ours < plain)


def against_depth(gt, backend):
    """Measures the memory of one additional z_i, for a network of dense layers."""
    energy = lambda gt, y, x: gt.xp.sum(gt.xp.tanh(x @ y))
    y = gt.asarray(np.random.default_rng(5).normal(size=WIDTH))

    def step(way, depth, n, unrolled=False):
        layers = constants(gt, {"all": codes_like(depth, WIDTH, WIDTH) / WIDTH**0.5})
        zs = codes_like(n, 32, WIDTH)
        return bytes_of(gt, backend, way, dense, energy, layers, y, zs, unrolled)

    few = {"torch": 24, "jax": 384}[backend]  # beyond this N, the peak grows linearly
    for depth in DEPTHS:
        for name, way in ways(gt).items():
            further = (step(way, depth, few + 16) - step(way, depth, few)) / 16
            note("layers", backend, name, further)
        sizes = [x[-1] / 1e6 for x in noted("layers", backend)]
        print(
            f"  {depth:2} layers: each additional z_i needs "
            "{:.3f} MB, with double backward {:.3f} MB".format(*sizes)
        )
    ours, plain = noted("layers", backend)
    claim("with frozen the memory does not depend on G's depth", max(ours) < 1.01 * min(ours))
    times = plain[-1] / ours[-1]
    claim(f"at {DEPTHS[-1]} layers frozen needs {times:.0f} times less memory", times > 5)
    if backend == "jax" and not QUICK:
        ours, plain = (step(way, 24, 4, unrolled=True) / 1e6 for way in ways(gt).values())
        claim(
            "with 4 z_i in a Python loop under jit, frozen saves no memory, because XLA eliminates "
            f"the recomputation ({ours:.2f} MB, {plain:.2f} MB)",
            0.9 < ours / plain < 1.1,
        )


def dense(gt, layers, z):
    layer = lambda z, w: gt.xp.tanh(z @ w)
    if gt.__name__ == "gradtools.jax":
        import jax

        return jax.lax.scan(lambda z, w: (layer(z, w), None), z, layers["all"])[0]
    return functools.reduce(layer, layers["all"], z)


def codes_like(*shape):
    return np.random.default_rng(4).normal(size=shape)


def note(against, backend, way, size):
    BYTES.setdefault((against, backend, way), []).append(size)


def noted(against, backend):
    return [BYTES[against, backend, way] for way in ("frozen", "double backward")]


def bytes_of(gt, backend, way, G, f, weights, y, zs, unrolled=False):
    """Returns the peak memory of dg/dy for a function g of all df/dz_i."""

    def step(y, zs, weights):
        use = way(lambda z: G(gt, weights, z))
        slopes = lambda y: latent_gradients(gt, f, use, y, zs, unrolled)
        return gt.grad(lambda y: gt.xp.mean(slopes(y) ** 2) ** 0.5)(y)

    return {"torch": live_bytes, "jax": compiled_bytes}[backend](step, y, gt.asarray(zs), weights)


def draw():
    """Plots the measurements of all backends so far, and saves the picture as out/frozen.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # opens no window, regardless of the user's settings
    left, right = figure.subplots(1, 2)
    colours = {"frozen": "#22688c", "double backward": "#b8542c"}
    panels = {"N": (left, COUNTS), "layers": (right, DEPTHS)}
    for (against, backend, way), sizes in BYTES.items():
        axes, at = panels[against]
        style = {"torch": "o-", "jax": "s:"}[backend]
        axes.plot(at, np.array(sizes) / 1e6, style, color=colours[way], label=f"{way}, {backend}")
    left.set(xlabel="N, the number of z_i", ylabel="MB at the peak", yscale="log")
    left.set_xscale("log", base=2)
    left.set_title("dg/dy through a convolutional decoder")
    right.set(xlabel="dense layers of G", ylabel="MB for one additional z_i", ylim=(0, None))
    right.set_title("memory of an additional z_i")
    left.legend()
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / "frozen.png", dpi=110)


def compiled(gt, program):
    """Returns the compiled program in JAX, and the unchanged program in PyTorch."""
    return gt.compile(program) if gt.__name__ == "gradtools.jax" else program


def progress(steps, what):
    """Returns the steps, with a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc=f"  {what}", unit="step", leave=False, disable=None)


if __name__ == "__main__":
    if QUICK:
        sys.argv.remove("--quick")
    main(show, tolerance=1e-9)
