"""Checks a hand-derived gradient formula of a complex affine layer O = W I + b.

    dL/dI = W^H dL/dO        dL/dW = dL/dO I^H        dL/db = the sum of dL/dO over the batch

The formula is checked with complex arrays and with pairs of real arrays, where (a + ib)(c + id) =
(ac - bd) + i(ad + bc). In both backends the gradient of a real L is dL/dRe + i dL/dIm, so the step
`z - rate * grad` decreases L. Native ``jax.grad`` returns the conjugate of this gradient.
"""

import numpy as np
from common import claim, difference, flat, main


def show(gt, backend):
    xp = gt.xp
    rng = np.random.default_rng(0)
    complex_normal = lambda *shape: rng.normal(size=shape) + 1j * rng.normal(size=shape)
    W, I, b, wanted = map(complex_normal, ((3), (4), (3), (3)), ((4), (5), (1), (5)))

    def loss(O, wanted):  # sum of |O - wanted|^4, so dL/dO is nonlinear
        error = O - wanted
        return xp.sum((error * xp.conj(error)).real ** 2)

    affine = lambda W, I, b: W @ I + b
    gW, gI, gb = (
        gt.to_numpy(g)
        for g in gt.grad(lambda W, I, b: loss(affine(W, I, b), gt.asarray(wanted)), (0, 1, 2))(
            *map(gt.asarray, (W, I, b))
        )
    )
    gO = gt.to_numpy(gt.grad(loss)(gt.asarray(affine(W, I, b)), gt.asarray(wanted)))
    for name, mine, theirs in [
        ("dL/dI = W^H dL/dO", W.conj().T @ gO, gI),
        ("dL/dW = dL/dO I^H", gO @ I.conj().T, gW),
        ("dL/db = sum dL/dO", gO.sum(axis=1, keepdims=True), gb),
    ]:
        apart = difference(mine, theirs)
        claim(f"{name}: error {apart:.1e}", apart < 1e-14)

    def real_loss(W, I, b):
        (Wr, Wi), (Ir, Ii), (br, bi) = W, I, b
        re = Wr @ Ir - Wi @ Ii + br - gt.asarray(wanted.real)
        im = Wr @ Ii + Wi @ Ir + bi - gt.asarray(wanted.imag)
        return xp.sum((re**2 + im**2) ** 2)

    pair = lambda z: (gt.asarray(z.real), gt.asarray(z.imag))
    pairs = gt.grad(real_loss, (0, 1, 2))(*map(pair, (W, I, b)))
    joined = np.concatenate([flat(gt, re) + 1j * flat(gt, im) for re, im in pairs])
    together = np.concatenate([gW.ravel(), gI.ravel(), gb.ravel()])
    apart = difference(joined, together)
    claim(f"as pairs of real arrays: error {apart:.1e}", apart < 1e-14)

    at = lambda W: float(loss(gt.asarray(W @ I + b), gt.asarray(wanted)))
    before, after = at(W), at(W - 1e-5 * gW)
    claim(f"a step along -dL/dW reduces L from {before:.2f} to {after:.2f}", after < before)
    return {"gradients": [gt.asarray(g) for g in (gW, gI, gb)]}


if __name__ == "__main__":
    main(show)
