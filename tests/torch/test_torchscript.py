"""TorchScript hides what it computes: a derivative that PyTorch loses in it is refused."""

from __future__ import annotations

import re

import pytest
import torch

import gradtools.torch as gt
from gradtools.errors import GradtoolsError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
X = torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64)
T = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
FOR, ROR = "forward_over_reverse", "reverse_over_reverse"


def plain(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x) * torch.sigmoid(x)
    for _ in range(2):
        y = y * x + torch.exp(-y)
    return y.sum()


RIGHT = {
    "grad": lambda f: gt.grad(f)(X),
    "linearize": lambda f: gt.linearize(f, X)[1](T),
    "hvp, reverse": lambda f: gt.hvp(f, (X,), (T,), mode=ROR)[1][0],
    "third": lambda f: gt.grad(lambda x: gt.hvp(f, (x,), (T,), mode=ROR)[1][0] @ T)(X),
    "grad of linearize": lambda f: gt.grad(lambda x: gt.linearize(f, x)[1](T))(X),
    "chunked": lambda f: gt.hvp(
        lambda x: gt.chunked(lambda z: f(z[0])[None], 1)(x[None]).sum(), (X,), (T,), mode=ROR
    )[1][0],
}
LOST = {
    "jvp": lambda f: gt.jvp(f, (X,), (T,))[1],
    "beside another term": lambda f: gt.jvp(lambda x: f(x) + x.sum(), (X,), (T,))[1],
    "jacobian, forward": lambda f: gt.jacobian(f, mode="forward")(X),
    "hvp, forward": lambda f: gt.hvp(f, (X,), (T,), mode=FOR)[1][0],
    "grad of jvp": lambda f: gt.grad(lambda x: gt.jvp(f, (x,), (T,))[1])(X),
    "jvp of jvp": lambda f: gt.jvp(lambda x: gt.jvp(f, (x,), (T,))[1], (X,), (T,))[1],
    "jacobian of grad": lambda f: gt.jacobian(gt.grad(f), mode="forward")(X),
    "linearize of frozen": lambda f: gt.linearize(gt.frozen(f), X)[1](T),
    "frozen": lambda f: gt.grad(lambda x: gt.grad(gt.frozen(f))(x) @ T)(X),
    "checkpoint": lambda f: gt.jvp(gt.checkpoint(f), (X,), (T,))[1],
    "checkpoint, twice": lambda f: gt.hvp(gt.checkpoint(f), (X,), (T,), mode=FOR)[1][0],
    "mixed_partial": lambda f: gt.mixed_partial(
        lambda y, g: y * g, f, torch.tensor(1.0, dtype=torch.float64), X, T
    ),
    "torch.func": lambda f: torch.func.grad(lambda x: gt.grad(f)(x) @ T)(X),
    "jvp in torch.func": lambda f: torch.func.grad(lambda x: gt.jvp(f, (x,), (T,))[1])(X),
    "torch.func.jvp": lambda f: torch.func.jvp(gt.grad(f), (X,), (T,))[1],
    "vmap": lambda f: torch.vmap(lambda x: gt.jvp(f, (x,), (T,))[1])(X[None]),
}


torch.manual_seed(0)
NET = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
PLAIN = {"function": plain, "module": lambda x: NET(x).sum()}


def made(how, what):
    source = plain if what == "function" else NET
    hidden = torch.jit.script(source) if how == "scripted" else torch.jit.trace(source, X)
    for _ in range(3):  # it optimises what it has seen
        hidden(X.clone().requires_grad_()).sum().backward()
    return lambda x: hidden(x).sum()


@pytest.mark.parametrize("way", RIGHT)
@pytest.mark.parametrize("what", PLAIN)
@pytest.mark.parametrize("how", ["scripted", "traced"])
def test_in_reverse_mode_a_derivative_through_torchscript_is_the_plain_functions(how, what, way):
    hidden = made(how, what)
    for _ in range(2):
        torch.testing.assert_close(
            RIGHT[way](hidden), RIGHT[way](PLAIN[what]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.sampled(64, 128)
@pytest.mark.slow_at(
    ("module", "checkpoint, twice"), ("traced", "checkpoint, twice"), ("grad", "traced", "frozen")
)
@pytest.mark.parametrize("way", LOST)
@pytest.mark.parametrize("what", PLAIN)
@pytest.mark.parametrize("how", ["scripted", "traced"])
@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no_grad"])
def test_a_tangent_through_torchscript_is_right_or_refused(recorded, how, what, way):
    hidden = made(how, what)
    for _ in range(3):  # PyTorch's own first one is right at times, the later ones are not
        with torch.set_grad_enabled(recorded):
            expected = LOST[way](PLAIN[what])
            try:
                found = LOST[way](hidden)
            except GradtoolsError as error:
                assert re.search("TorchScript|vmap cannot map|torch.jit", str(error))  # noqa: PT017
            else:
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_trained_module_of_torchscript_has_no_silent_tangent():
    hidden = made("scripted", "module")
    for refused in (LOST["jvp"], LOST["beside another term"]):
        with pytest.raises(GradtoolsError, match="torch#73972"):
            refused(hidden)
    call = torch._C.ScriptMethod.__call__
    with pytest.raises(GradtoolsError, match="torch#73972"), torch.no_grad():
        LOST["jvp"](hidden)
    assert torch._C.ScriptMethod.__call__ is call
