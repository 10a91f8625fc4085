"""Prints the formulas of derivatives, and compares them with a derivation by hand.

The program prints the derivatives of square, exp, sinh and cube to second order, and draws their
backward passes. The program also prints the gradients of a complex affine layer, with complex
arrays and with their real and imaginary parts. Finally, the program checks a hand-written backward
pass of a convolutional network with `agrees_with`, which names the first entry that differs.
Pictures are written to out/.
"""

from pathlib import Path

import numpy as np
from common import claim, difference, main
from u05_double_backward import cube, exp, sinh, square

OUT = Path(__file__).parents[1] / "out"
READ: dict[str, list[str]] = {}  # the lines of each formula from the first backend

FUNCTIONS = {
    "square": (
        lambda gt, x: x**2,
        ["x̄ = 2 ȳ ⊙ x"],
        ["∂s/∂x = 2 ȳ ⊙ u", "∂s/∂ȳ = 2 x ⊙ u"],
    ),
    "exp": (
        lambda gt, x: gt.xp.exp(x),
        ["x̄ = ȳ ⊙ y"],
        ["∂s/∂x = ȳ ⊙ y ⊙ u", "∂s/∂ȳ = y ⊙ u"],
    ),
    "sinh": (
        lambda gt, x: gt.xp.sinh(x),
        ["T = cosh(x)", "x̄ = ȳ ⊙ T"],  # T has a name because it is used twice
        ["∂s/∂x = ȳ ⊙ y ⊙ u", "∂s/∂ȳ = T ⊙ u"],
    ),
    "cube": (
        lambda gt, x: x**3,
        ["x̄ = 3 ȳ ⊙ x²"],
        ["∂s/∂x = 6 ȳ ⊙ x ⊙ u", "∂s/∂ȳ = 3 u ⊙ x²"],
    ),
}


def show(gt, backend):
    return tutorial(gt, backend) | complex_affine(gt, backend) | network(gt, backend)


def formula(gt, name, f, *args, **options):
    """Returns the formula of f, and checks that both backends print the same formula."""
    found = gt.formula(f, *args, **options)
    lines = str(found).splitlines()[:-1]  # the last line contains the relative error
    if READ.setdefault(name, lines) is not lines:
        claim(f"{name} has the same formula in both frameworks", READ[name] == lines)
    return found


# --- square, exp, sinh, cube ---------------------------------------------------------------


def tutorial(gt, backend):
    x = gt.asarray(np.array([-1.2, 0.4, 1.0, 2.0]))
    OUT.mkdir(exist_ok=True)
    for name, (f, first, second) in FUNCTIONS.items():
        print(f"  -- {name}")
        found = formula(gt, name, lambda x, f=f: f(gt, x), x, order=2)
        claim(f"order 1: {', '.join(found.lines(1))}", found.lines(1) == first)
        claim(f"order 2: {', '.join(found.lines(2))}", found.lines(2) == second)
    for make in (square, exp, sinh, cube):
        drawn(gt, backend, make.__name__, make(gt), x)
    return {}


def drawn(gt, backend, name, f, x):
    """Draws the gradient graphs of f for order 1 and 2, and counts the bytes of saved values."""
    for order in (1, 2):
        graph = gt.gradient_graph(f, x, order=order)
        saved = {edge.value: edge.bytes for edge in graph.edges if edge.saved}
        path = OUT / f"{name}_order_{order}_{backend}.html"
        graph.save(path)
        passes = len({node.phase for node in graph.nodes})
        claim(
            f"out/{path.name}: {len(graph.nodes)} operations in {passes} passes, "
            f"{sum(saved.values())} bytes kept between them",
            passes == order + 1 and saved,
        )


# --- the complex affine layer --------------------------------------------------------------


def complex_affine(gt, backend):
    print("  -- O = W I + b")
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape) + 1j * rng.normal(size=shape)
    W, I, b, ct = normal(3, 4), normal(4), normal(3), normal(3)
    arrays = [gt.asarray(z) for z in (W, I, b)]
    affine = lambda W, I, b: W @ I + b
    whole = formula(gt, "complex affine", affine, *arrays, argnums=(0, 1, 2))
    claim(f"with complex arrays: {', '.join(whole.lines(1))}", "Ī = Wᴴ ȳ" in whole.lines(1))

    def in_parts(W_re, W_im, I_re, I_im, b_re, b_im):
        """Computes W I + b with (a + ib)(c + id) = (ac - bd) + i(ad + bc)."""
        return W_re @ I_re - W_im @ I_im + b_re, W_re @ I_im + W_im @ I_re + b_im

    split = [part for z in (W, I, b) for part in (z.real.copy(), z.imag.copy())]
    parts = formula(gt, "in parts", in_parts, *map(gt.asarray, split), argnums=tuple(range(6)))
    for line in parts.lines(1):
        print(f"  {line}")
    claim(f"combined: {', '.join(parts.lines(2))}", parts.lines(2)[1] == "Ī = Wᴴ Ō")
    mine = whole.agrees_with(lambda W, I, b, ct: (gt.xp.outer(ct, I.conj()), W.conj().T @ ct, ct))
    claim(f"dL/dW = dL/dO Iᴴ, dL/dI = Wᴴ dL/dO, dL/db = dL/dO: {mine}", mine)
    mine = whole.agrees_with(lambda W, I, b, ct: (gt.xp.outer(ct, I.conj()), W.T @ ct, ct))
    claim(f"with Wᵀ instead of Wᴴ: {mine}", not mine and mine.where.startswith("Ī"))

    _, pullback = gt.vjp(affine, *arrays)
    natively = [gt.to_numpy(g) for g in pullback(gt.asarray(ct))]
    _, pullback = gt.vjp(in_parts, *map(gt.asarray, split))
    apart = [gt.to_numpy(g) for g in pullback(tuple(map(gt.asarray, (ct.real, ct.imag))))]
    joined = [re + 1j * im for re, im in zip(apart[::2], apart[1::2], strict=True)]
    largest = max(difference(a, b) for a, b in zip(joined, natively, strict=True))
    claim(f"the two gradients are equal: error {largest:.1e}", largest < 1e-14)
    return {"affine": [gt.asarray(g) for g in natively]}


# --- a convolutional network, derived by hand ----------------------------------------------


def network(gt, backend):
    print("  -- conv, bias, relu, mean pool, linear, cross-entropy")
    rng = np.random.default_rng(1)
    shapes = {"X": (2, 1, 6, 6), "K": (3, 1, 3, 3), "c": (3,), "W": (4, 12), "b": (4,)}
    arrays = [gt.asarray(rng.normal(size=shape)) for shape in shapes.values()]
    labels = gt.asarray(np.array([2, 0]))
    loss = {"torch": loss_in_torch, "jax": loss_in_jax}[backend]
    argnums = (0, 1, 2, 3, 4)
    found = gt.formula(loss, *arrays, labels, argnums=argnums)  # names depend on the framework
    for line in found.lines(1):
        print(f"  {line}")
    derived = lambda **slip: lambda *xs: by_hand(*map(gt.to_numpy, xs), **slip)
    mine = found.agrees_with(derived())
    claim(f"derived by hand: {mine}", mine)
    slip = found.agrees_with(derived(flip=False))
    claim(f"derived without the flip of K: {slip}", not slip and slip.where.startswith("X̄"))
    slip = found.agrees_with(derived(transpose=False))
    claim(f"derived without the transpose of dW: {slip}", not slip and slip.where.startswith("W̄"))
    grads = gt.grad(loss, argnums)(*arrays, labels)
    return {"network": grads}


def loss_in_torch(X, K, c, W, b, labels):
    import torch.nn.functional as F

    H = F.relu(F.conv2d(X, K) + c[:, None, None])
    return F.cross_entropy(F.avg_pool2d(H, 2).flatten(1) @ W.T + b, labels)


def loss_in_jax(X, K, c, W, b, labels):
    import jax
    import optax

    H = jax.nn.relu(jax.lax.conv(X, K, (1, 1), "VALID") + c[:, None, None])
    window, zero = (1, 1, 2, 2), np.zeros((), X.dtype)
    P = jax.lax.reduce_window(H, zero, jax.lax.add, window, window, "VALID") / 4
    Z = P.reshape(len(X), -1) @ W.T + b
    return optax.softmax_cross_entropy_with_integer_labels(Z, labels).mean()


def by_hand(X, K, c, W, b, labels, ct, flip=True, transpose=True):
    """Returns the gradients with respect to X, K, c, W and b, for the cotangent ct of the loss."""
    n, m = len(X), len(K)
    Z = correlated(X, K) + c[:, None, None]
    side = Z.shape[2] // 2
    P = np.maximum(Z, 0).reshape(n, m, side, 2, side, 2).mean((3, 5)).reshape(n, -1)
    S = P @ W.T + b
    p = np.exp(S - S.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)

    dS = ct * (p - np.eye(len(b))[labels]) / n
    dW = dS.T @ P if transpose else P.T @ dS
    dP = (dS @ W).reshape(n, m, side, 1, side, 1)
    dZ = np.broadcast_to(dP / 4, (n, m, side, 2, side, 2)).reshape(Z.shape) * (Z > 0)
    dK = np.swapaxes(correlated(np.swapaxes(X, 0, 1), np.swapaxes(dZ, 0, 1)), 0, 1)
    padded = np.pad(dZ, [(0, 0), (0, 0), (2, 2), (2, 2)])
    turned = K[:, :, ::-1, ::-1] if flip else K
    dX = correlated(padded, np.swapaxes(turned, 0, 1))
    return dX, dK, dZ.sum((0, 2, 3)), dW, dS.sum(0)


def correlated(X, K):
    """Convolves: sums X[n, i, y + a, x + b] K[o, i, a, b] over i, a and b."""
    windows = np.lib.stride_tricks.sliding_window_view(X, K.shape[2:], (2, 3))
    return np.einsum("niyxab,oiab->noyx", windows, K)


if __name__ == "__main__":
    main(show)
