"""A torch::autograd::Function of C++ is tried before a derivative of its gradient is trusted."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

import gradtools.torch as gt
from gradtools.errors import GradtoolsError, LostDerivativeError

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("c++") and importlib.util.find_spec("ninja")),
        reason="no C++ compiler, or no ninja",
    ),
]
X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
T = torch.ones_like(X)
ROR = "reverse_over_reverse"


@pytest.fixture(scope="module")
def ops(gradtools_device):
    spec = importlib.util.spec_from_file_location("building", EXAMPLES / "building.py")
    building = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(building)
    building.torch_extension("cpp_functions", Path(__file__).parents[1] / "support" / "native")
    return torch.ops.cpp_functions


def hidden(op):
    """The same where no call of an operator can be seen, as if it were bound by pybind."""
    scripted = torch.jit.trace(op, X)
    return lambda x: scripted(x)


AGAIN = {
    "grad of grad": lambda f: gt.grad(lambda x: gt.grad(f)(x).sum())(X),
    "hvp": lambda f: gt.hvp(f, (X,), (T,), mode=ROR)[1][0],
    "hessian": lambda f: gt.hessian(f)(X).sum(0),
    "of a chunk": lambda f: gt.grad(
        lambda x: gt.grad(lambda z: gt.chunked(lambda r: f(r)[None], 1)(z[:, None]).sum())(x).sum()
    )(X),
    "of a checkpoint": lambda f: gt.grad(lambda x: gt.grad(gt.checkpoint(f))(x).sum())(X),
}


@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("name", ["right", "unrecorded", "detached"])
def test_its_second_derivative_is_right_or_refused_by_its_name(ops, name, way):
    f = lambda x: getattr(ops, name)(x).sum()
    torch.testing.assert_close(gt.grad(f)(X), 3 * X**2)
    if name == "right":
        torch.testing.assert_close(AGAIN[way](f), 6 * X)
    else:
        with pytest.raises(LostDerivativeError, match=rf"the C\+\+ .*Function {name.title()}, "):
            AGAIN[way](f)


@pytest.mark.parametrize("way", AGAIN)
def test_one_that_cannot_be_seen_is_not_trusted(ops, way):
    f = hidden(lambda x: ops.detached(x).sum())
    with pytest.raises(LostDerivativeError, match=r"Detached, .*(bind it by TORCH_LIBRARY|itself)"):
        AGAIN[way](f)


def test_its_tangent_is_the_transpose_of_its_backward_or_refused(ops):
    for name in ("right", "detached"):
        push = gt.linearize(lambda x, name=name: getattr(ops, name)(x), X)[1]
        torch.testing.assert_close(push(T), 3 * X**2)
    torch.testing.assert_close(gt.jvp(lambda x: ops.detached(x), (X,), (T,))[1], 3 * X**2)
    with pytest.raises(LostDerivativeError, match=r"Unrecorded, .*cotangents"):
        gt.linearize(lambda x: ops.unrecorded(x), X)[1](T)
    with pytest.raises(LostDerivativeError, match=r"Unrecorded, .*cotangents"):
        gt.jvp(lambda x: ops.unrecorded(x), (X,), (T,))
    with pytest.raises(GradtoolsError, match=r"jvp: .* C\+\+, which has no forward mode.*lineariz"):
        gt.jvp(hidden(lambda x: ops.right(x)), (X,), (T,))


def test_torch_func_over_it_is_refused_in_words(ops):
    with pytest.raises(GradtoolsError, match=r"grad: .* C\+\+, which torch.func's transforms"):
        torch.func.grad(lambda x: gt.grad(lambda x: ops.right(x).sum())(x).sum())(X)
