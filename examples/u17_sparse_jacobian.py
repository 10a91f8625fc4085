"""Computes a Jacobian with 1,000 columns from three products by coloring its sparsity pattern.

Newton's method solves an implicit step of a reaction-diffusion equation on a line. Each equation
depends on a point and its two neighbors, so one product computes every third column.
"""

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from common import claim, difference, flat, main

POINTS, STEP = 1_000, 0.1
BANDS = scipy.sparse.diags([1.0, 1.0, 1.0], [-1, 0, 1], shape=(POINTS, POINTS))


def show(gt, backend):
    xp = gt.xp
    before = gt.asarray(np.exp(-(np.linspace(-3, 3, POINTS) ** 2)))

    def residual(u):
        """Returns the residual of u = before + STEP (u'' - u^3), with u = 0 beyond the ends."""
        edge = xp.zeros(1, dtype=u.dtype)
        padded = xp.concat([edge, u, edge])
        flow = padded[2:] - 2 * u + padded[:-2]
        return u - before - STEP * (flow - u**3)

    sparse = gt.jacobian(residual, sparsity=BANDS)
    J = to_scipy(gt, sparse(before), backend)
    dense = gt.to_numpy(gt.jacobian(residual)(before))
    apart = difference(J.toarray().ravel(), dense.ravel())
    claim(
        f"{J.nnz} of {dense.size} entries are stored; the error of J is {apart:.1e}", apart < 1e-12
    )

    u = before
    for _ in range(4):
        J = to_scipy(gt, sparse(u), backend)
        u = u - gt.asarray(scipy.sparse.linalg.spsolve(J.tocsc(), gt.to_numpy(residual(u))))
    left = float(xp.max(xp.abs(residual(u))))
    claim(f"after four Newton steps the residual is {left:.1e}", left < 1e-12)

    energy = lambda u: xp.sum((u[1:] - u[:-1]) ** 2) + xp.sum(u**4)
    H = to_scipy(gt, gt.hessian(energy, sparsity=BANDS)(before), backend)
    off = difference(H.toarray().ravel(), gt.to_numpy(gt.hessian(energy)(before)).ravel())
    claim(f"{H.nnz} entries are stored; the error of the Hessian is {off:.1e}", off < 1e-12)
    return {"solution": flat(gt, u).tolist()}


def to_scipy(gt, J, backend):
    """Converts a sparse array of the framework to a SciPy sparse array."""
    if backend == "torch":
        J = J.coalesce()
        values, (rows, columns) = J.values(), gt.to_numpy(J.indices())
    else:
        values, (rows, columns) = J.data, gt.to_numpy(J.indices).T
    return scipy.sparse.coo_array((gt.to_numpy(values), (rows, columns)), shape=J.shape).tocsr()


if __name__ == "__main__":
    main(show)
