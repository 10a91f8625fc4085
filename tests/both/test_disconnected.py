"""The same function is connected in both backends, or in neither."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from gradtools.errors import DisconnectedInputError, GradtoolsWarning
from tests.operators.test_disconnected import PATHS, X


def _outcome(backend: str, path, policy: str) -> tuple[str, list[float]]:
    gt = importlib.import_module(f"gradtools.{backend}")
    try:
        g = gt.grad(lambda x: path.f(gt, x), disconnected_inputs=policy)(gt.asarray(X))
    except DisconnectedInputError:
        return "raised", []
    return "gave", np.asarray(gt.to_numpy(g)).tolist()


@pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")
@pytest.mark.parametrize("policy", ["raise", "warn", "zeros", "strict"])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_policy_has_the_same_outcome_in_both_backends(path, policy):
    kind, values = _outcome("torch", path, policy)
    other_kind, other_values = _outcome("jax", path, policy)
    assert (
        kind
        == other_kind
        == ("gave" if path.connected or policy in ("warn", "zeros") else "raised")
    )
    np.testing.assert_allclose(values, other_values, rtol=1e-12)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_warning_is_given_in_both_backends_or_in_neither(path):
    for backend in ("torch", "jax"):
        gt = importlib.import_module(f"gradtools.{backend}")
        run = lambda gt=gt: gt.grad(lambda x: path.f(gt, x), disconnected_inputs="warn")(
            gt.asarray(X)
        )
        if path.connected:
            run()
            continue
        with pytest.warns(GradtoolsWarning):
            run()
