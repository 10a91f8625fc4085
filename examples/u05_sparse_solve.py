"""Differentiates SciPy's sparse solver, and estimates a conductivity from temperatures.

x solves A x = b with a sparse A, given by its values, rows and columns. Let c be the cotangent of
x, and let lambda solve A^T lambda = c. The cotangent of b is lambda, and the cotangent of the value
at (i, j) is -lambda_i x_j. The tangent dx solves A dx = db - dA x. A^T is A with exchanged rows and
columns, so both rules call the solver again, which makes the solver differentiable to any order. On
a square with cold walls, the program estimates k in -div(k grad u) = f from u, by a trust-region
method with Hessian products.
"""

import numpy as np
from checks import every_derivative
from common import claim, difference, flat, main
from scipy.optimize import minimize
from scipy.sparse import csc_array
from scipy.sparse.linalg import splu

SIDE = 5


def sparse_solver(gt, backend):
    """Returns the solver as a function that is differentiable to any order in values and b."""

    def kernel(values, rows, columns, b):
        return splu(csc_array((values, (rows, columns)), shape=(b.size, b.size))).solve(b)

    solve = gt.host_function(kernel, out=lambda values, rows, columns, b: b)

    def fwd(values, rows, columns, b):
        x = solve(values, rows, columns, b)
        return x, (values, rows, columns, x)

    def bwd(res, ct):
        values, rows, columns, x = res
        by_b = solve(values, columns, rows, ct)
        return -by_b[rows] * x[columns], None, None, by_b

    def forward(primals, tangents):
        values, rows, columns, b = primals
        d_values, _, _, db = tangents
        x = solve(values, rows, columns, b)
        moved = added(backend, gt.xp.zeros_like(x), rows, d_values * x[columns])
        return x, solve(values, rows, columns, db - moved)

    solve.defvjp(fwd, bwd)
    solve.defjvp(forward)
    return solve


def added(backend, x, places, values):
    """Returns x with the values added at the given indices."""
    return x.index_add(0, places, values) if backend == "torch" else x.at[places].add(values)


def show(gt, backend):
    xp, solve = gt.xp, sparse_solver(gt, backend)
    first, second, walls = (gt.asarray(nodes) for nodes in edges())
    rows = xp.concat((first, second, first, second, walls))
    columns = xp.concat((first, second, second, first, walls))
    heat = gt.asarray(np.where(np.arange(SIDE**2) % 3 == 0, 1.0, 0.2))

    def matrix(log_k):
        """Returns the values of A; the conductivity of an edge is the mean over its two nodes."""
        k = xp.exp(log_k)
        through = (k[first] + k[second]) / 2
        return xp.concat((through, through, -through, -through, k[walls]))

    temperature = lambda log_k, b: solve(matrix(log_k), rows, columns, b)
    x, y = np.meshgrid(np.linspace(-1, 1, SIDE), np.linspace(-1, 1, SIDE))
    truth = np.where(x**2 + (y - 0.3) ** 2 < 0.3, 1.0, 0.0).ravel()  # a round inclusion
    measured = temperature(gt.asarray(truth), heat)
    dense(gt, matrix(gt.asarray(truth)), rows, columns, gt.to_numpy(heat), measured)

    def loss(log_k):
        misfit = ((temperature(log_k, heat) - measured) ** 2).mean()
        return misfit + 1e-9 * ((log_k[first] - log_k[second]) ** 2).mean()

    rng = np.random.default_rng(0)
    at, t = rng.normal(size=(2, SIDE**2))
    results = every_derivative(gt, backend, loss, 0.3 * at, t, tolerance=1e-10)
    both = lambda b: (temperature(b / 10, b) ** 2).mean()  # b also affects A's values
    results = [results, every_derivative(gt, backend, both, at, t, tolerance=1e-10)]

    gradient = gt.value_and_grad(loss)
    product = lambda x, t: gt.hvp(loss, (x,), (t,))[1][0]
    if backend == "jax":
        gradient, product = gt.compile(gradient), gt.compile(product)
    scale = 1e6  # SciPy's stopping criterion is absolute
    found = minimize(
        lambda x: [scale * flat(gt, part) for part in gradient(gt.asarray(x))],
        np.zeros(SIDE**2),
        jac=True,
        hessp=lambda x, t: scale * flat(gt, product(gt.asarray(x), gt.asarray(t))),
        method="trust-ncg",
        options={"gtol": 1e-4},
    )
    off = np.max(np.abs(found.x - truth))
    print(f"  {found.nit} trust-region steps, {found.nhev} products with the Hessian")
    claim(f"the largest error of log k at {SIDE**2} nodes is {off:.3f}", off < 0.1)
    return {"derivatives": results}


def edges():
    """Returns the two nodes of each inner edge, and the node of each edge to a wall."""
    node = np.arange(SIDE**2).reshape(SIDE, SIDE)
    first = np.concatenate([node[:, :-1].ravel(), node[:-1].ravel()])
    second = np.concatenate([node[:, 1:].ravel(), node[1:].ravel()])
    return first, second, np.concatenate([node[0], node[-1], node[:, 0], node[:, -1]])


def dense(gt, values, rows, columns, b, found):
    """Compares the solution with NumPy's solution for the full matrix."""
    A = np.zeros((b.size, b.size))
    np.add.at(A, (gt.to_numpy(rows), gt.to_numpy(columns)), gt.to_numpy(values))
    apart = difference(gt.to_numpy(found), np.linalg.solve(A, b))
    claim(f"the sparse solver differs from the dense solver by {apart:.0e}", apart < 1e-12)


if __name__ == "__main__":
    main(show, tolerance=1e-10)
