"""Defines the linear solvers for `implicit_solution` with JAX functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.scipy.sparse import linalg

from gradtools.backend import Array
from gradtools.jax.shardings import varies, varying


def cg(matvec: Callable[[Array], Array], b: Array) -> Array:
    return linalg.cg(matvec, b, tol=_tolerance(b))[0]


def gmres(matvec: Callable[[Array], Array], b: Array) -> Array:
    options = {"tol": _tolerance(b), "restart": min(30, b.size), "maxiter": 30}
    return linalg.gmres(matvec, b, solve_method="incremental", **options)[0]


def dense(matvec: Callable[[Array], Array], b: Array) -> Array:
    units = varying(jax.numpy.eye(b.size, dtype=b.dtype), varies(b))
    columns = jax.vmap(matvec)(units)
    return jax.numpy.linalg.solve(columns.T, b)


def _tolerance(b: Array) -> float:
    return 1e-13 if b.dtype == jax.numpy.float64 else 1e-6
