"""Builds the sparse tensors that `gradtools.sparse_jacobians` returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradtools.errors import GradtoolsError
from gradtools.torch.functorch_wrappers import levels_of_vmap

Tensor = torch.Tensor


def sparse_array(index: np.ndarray, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Builds a sparse COO tensor.

    `index` has one row per axis, and the columns of `index` are sorted and unique.
    """
    if levels_of_vmap(values):
        raise GradtoolsError(
            "jacobian, hessian: vmap does not support sparse results, because PyTorch has no "
            "batched sparse tensors. Loop over the examples, or leave sparsity= out."
        )
    at = torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(values.device)
    return torch.sparse_coo_tensor(
        at, values, tuple(shape), is_coalesced=True, check_invariants=False
    )


def summed(groups: np.ndarray, terms: Tensor, like: Tensor) -> Tensor:
    """Sums the terms of each group. The result has the shape and dtype of `like`."""
    at = torch.from_numpy(groups).to(terms.device)
    return torch.zeros_like(like).index_add(0, at, terms)
