"""A torch::autograd::Function of C++: PyTorch's own number or error, and `checked` names it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

import gradtools.torch as gt
from gradtools.errors import DerivativeError, GradtoolsError
from gradtools.testing import checked

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


@pytest.mark.filterwarnings("ignore::gradtools.errors.DisconnectedInputWarning")
@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("name", ["right", "unrecorded", "detached"])
def test_its_second_derivative_is_that_of_pytorch_and_checked_names_a_loss(ops, name, way):
    f = lambda x: getattr(ops, name)(x).sum()
    torch.testing.assert_close(gt.grad(f)(X), 3 * X**2)
    torch.testing.assert_close(AGAIN[way](f), 6 * X if name == "right" else 0 * X)
    if name == "right":
        with checked():
            AGAIN[way](f)
    else:
        words = rf"second derivative of cpp_functions.{name} is"
        with pytest.raises(DerivativeError, match=words), checked():
            AGAIN[way](f)


def test_its_linear_map_transposes_its_backward_and_its_forward_mode_is_refused(ops):
    for name in ("right", "detached"):
        push = gt.linearize(lambda x, name=name: getattr(ops, name)(x), X)[1]
        torch.testing.assert_close(push(T), 3 * X**2)
    refused = r"jvp: .* has no forward mode in PyTorch\. Use linearize"
    for op in (ops.right, ops.unrecorded, ops.detached, hidden(ops.right)):
        with pytest.raises(GradtoolsError, match=refused):
            gt.jvp(lambda x, op=op: op(x), (X,), (T,))


def test_torch_func_over_it_is_refused_in_words(ops):
    with pytest.raises(GradtoolsError, match=r"grad: .* another transform of torch.func, cannot"):
        torch.func.grad(lambda x: gt.grad(lambda x: ops.right(x).sum())(x).sum())(X)
