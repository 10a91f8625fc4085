"""Both backends return the same gradients for connected arguments, including zero derivatives."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.operators.test_disconnected import CONNECTED, X


def _gradient(backend: str, path) -> np.ndarray:
    gt = importlib.import_module(f"gradtools.{backend}")
    return np.asarray(gt.to_numpy(gt.grad(lambda x: path.f(gt, x))(gt.asarray(X))))


@pytest.mark.parametrize("path", CONNECTED, ids=str)
def test_what_is_connected_has_the_same_gradient_in_both_backends(path):
    np.testing.assert_allclose(_gradient("torch", path), _gradient("jax", path), rtol=1e-12)
