"""Derivatives are correct while another thread uses forward mode; interrupts leave no mode set."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import gradtools
import gradtools.torch as gt
from gradtools.torch.modes import dual_level
from tests.support.state_of_process import changes, everything

pytestmark = pytest.mark.torch
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
X = torch.randn(3, dtype=torch.float64)
ATTEND = nn.functional.scaled_dot_product_attention


def loss(x):
    rows = x.outer(x.cos())[None, None]
    return NET(x).square().sum() + ATTEND(rows, rows.sin(), rows).sum()


WAYS = {
    "grad": lambda x: gt.grad(loss)(x),
    "jvp": lambda x: gt.jvp(loss, (x,), (x.cos(),))[1],
    "linearize": lambda x: gt.linearize(loss, x)[1](x.cos()),
    "hvp": lambda x: gt.hvp(loss, (x,), (x.cos(),))[1][0],
    "hvp, forward over reverse": lambda x: gt.hvp(
        loss, (x,), (x.cos(),), mode="forward_over_reverse"
    )[1][0],
    "jacobian, reverse": lambda x: gt.jacobian(NET, mode="reverse")(x),
    "jacobian, forward": lambda x: gt.jacobian(NET, mode="forward")(x),
    "hessian": lambda x: gt.hessian(loss)(x),
    "per_example_grad": lambda x: gt.per_example_grad(lambda w, z: (w * NET(z)).sum())(
        x[:2], x.outer(x)
    ),
    "mixed_partial": lambda x: gt.mixed_partial(
        lambda y, g: (y * g).sum() ** 2, torch.sin, x, x.cos(), x
    ),
    "frozen": lambda x: gt.grad(
        lambda y: gt.grad(lambda z: (gt.frozen(NET)(z).sum() * y.sum()) ** 2)(x).sum()
    )(x),
}


@pytest.mark.parametrize("name", WAYS)
def test_beside_a_thread_that_stays_in_forward_mode(name):
    """All threads share the dual level, so gradtools computes the tangent from the pullback."""
    expected = WAYS[name](X).detach()
    entered, done = threading.Event(), threading.Event()

    def other():
        with forward_ad.dual_level():
            entered.set()
            done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    try:
        found = WAYS[name](X)
    finally:
        done.set()
        thread.join()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def interrupted(name, count):
    """Raise KeyboardInterrupt at call number `count` of gradtools; return whether it was raised.

    Python handles signals at the start of calls. `__enter__` and `__exit__` are excluded, because
    context managers, even PyTorch's, do not restore their state after an interrupt.
    """
    left = count

    def at_call(frame, event, arg):
        nonlocal left
        code = frame.f_code
        if event == "call" and HOUSE in code.co_filename and code.co_name not in _CONTEXTS:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    try:
        sys.setprofile(at_call)
        WAYS[name](X)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


HOUSE = str(Path(gradtools.__file__).parent)
_CONTEXTS = ("__enter__", "__exit__")


@pytest.mark.parametrize("name", ["grad", "jvp", "linearize", "hvp", "jacobian, forward"])
def test_an_interrupt_at_any_call_leaves_no_mode(name):
    WAYS[name](X)  # the first call imports modules
    before, count = everything(), 1
    while interrupted(name, count):
        assert not changes(before, everything()), count
        with dual_level():  # raises an error if a dual level is still active
            pass
        count += 1
    assert count > 20
