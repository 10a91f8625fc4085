"""Defines the linear solvers for `implicit_solution` with JAX functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.scipy.sparse import linalg

from gradtools.backend import Array
from gradtools.errors import noted
from gradtools.jax.shardings import varies, varying

_VARYING = (
    "implicit_solution: jax.scipy's gmres does not support shard_map with check_vma=True. Pass "
    "linear_solve='dense' or a function (matvec, b) -> x, or 'cg' for a symmetric dF/dz."
)


def cg(matvec: Callable[[Array], Array], b: Array) -> Array:
    return linalg.cg(matvec, b, tol=_tolerance(b))[0]


def gmres(matvec: Callable[[Array], Array], b: Array) -> Array:
    options = {"tol": _tolerance(b), "restart": min(30, b.size), "maxiter": 30}
    solve = partial(noted, _VARYING, linalg.gmres) if varies(b) else linalg.gmres
    return solve(matvec, b, solve_method="incremental", **options)[0]


def dense(matvec: Callable[[Array], Array], b: Array) -> Array:
    units = varying(jax.numpy.eye(b.size, dtype=b.dtype), varies(b))
    columns = jax.vmap(matvec)(units)
    return jax.numpy.linalg.solve(columns.T, b)


def _tolerance(b: Array) -> float:
    return 1e-13 if b.dtype == jax.numpy.float64 else 1e-6
