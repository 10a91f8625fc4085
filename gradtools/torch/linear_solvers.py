"""Implements conjugate gradients, GMRES and a dense solver for `implicit_solution`.

Conjugate gradients and GMRES stop when the relative residual is below a tolerance. Under vmap the
value of the residual cannot be read, so both solvers run the maximum number of iterations.

Source: Saad, Iterative methods for sparse linear systems, 2003, algorithms 6.18 and 6.9.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradtools.torch.functorch_wrappers import may_have_no_value

Tensor = torch.Tensor
_BASIS, _RESTARTS = 30, 30


def cg(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    x, r, p = torch.zeros_like(b), b, b
    rr = stop = r @ r
    stop = stop * _tolerance(b) ** 2
    for _ in range(2 * len(b) + 10):
        if _holds(rr <= stop):
            break
        q = matvec(p)
        step = _quotient(rr, p @ q)
        x, r, before = x + step * p, r - step * q, rr
        rr = r @ r
        p = r + _quotient(rr, before) * p
    return x


def gmres(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    x, stop = torch.zeros_like(b), _tolerance(b) * torch.linalg.vector_norm(b)
    for _ in range(min(_RESTARTS, 2 + len(b))):
        r = b - matvec(x)
        size = torch.linalg.vector_norm(r)
        if _holds(size <= stop):
            break
        basis, columns = [_quotient(r, size)], list[Tensor]()
        for k in range(1, min(len(b), _BASIS) + 1):
            w, V = matvec(basis[-1]), torch.stack(basis)
            h = V @ w
            w = w - h @ V
            again = V @ w  # w is orthogonalized twice, for accuracy
            w, h = w - again @ V, h + again
            length = torch.linalg.vector_norm(w)
            if _holds(~torch.isfinite(length)):  # pinv raises an error for NaN
                return x * length
            zeros = h.new_zeros(min(len(b), _BASIS) - k)
            columns.append(torch.cat([h, length[None], zeros]))
            H = torch.stack(columns, 1)
            target = torch.cat([size[None], h.new_zeros(len(H) - 1)])
            y = torch.linalg.pinv(H) @ target
            if _holds(torch.linalg.vector_norm(H @ y - target) <= stop) or _holds(length == 0):
                break
            basis.append(_quotient(w, length))
        x = x + y @ torch.stack(basis[: len(y)])
    return x


def dense(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    units = torch.eye(len(b), dtype=b.dtype, device=b.device)
    A = torch.stack([matvec(e) for e in units], 1)
    return torch.linalg.solve_ex(A, b).result  # the caller checks the residual


def _tolerance(b: Tensor) -> float:
    return 1e-13 if b.dtype == torch.float64 else 1e-6


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """Computes x / y, or 0 where y = 0."""
    return torch.where(y == 0, torch.zeros_like(x), x / torch.where(y == 0, 1, y))


def _holds(x: Tensor) -> bool:
    return not may_have_no_value(x) and bool(x)
