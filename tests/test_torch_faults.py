"""What only PyTorch has: odd tensors, hooks that raise, modes around a call, the meta device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from every_operator import POINT, USES, Use, World, healthy, leaves
from state_of_process import bits, changes, everything
from test_faults import outcome
from test_faults_arrays import assert_same

import gradtools.torch as gt
from gradtools import GradtoolsError

MINE = [use for use in USES if "torch" in use.backends]
P = torch.tensor(POINT)
Z = P + 1j * P.flip(0)

TENSORS = {
    "every second entry": lambda: P.repeat_interleave(2)[::2],
    "a column": lambda: torch.stack([P, P], 1)[:, 0],
    "with an offset": lambda: torch.cat([P, P])[4:],
    "a parameter": lambda: torch.nn.Parameter(P.clone()),
    "tracked": lambda: P.clone().requires_grad_(),
    "in a graph": lambda: P.clone().requires_grad_() * 1.0,
    "made in inference mode": lambda: in_inference_mode(P),
    "a negative view": lambda: torch._neg_view(-P),
    "imaginary part of a conjugate": lambda: torch.complex(P, -P).conj().imag,
    "expanded": lambda: P[:1].clone().expand(4),
    "a subclass": lambda: P.clone().as_subclass(Named),
    "detached from a leaf": lambda: P.clone().requires_grad_().detach(),
}
COMPLEX = {
    "a conjugate view": lambda: Z.conj().resolve_conj().conj(),
    "a strided conjugate": lambda: torch.stack([Z, Z], 1)[:, 0].conj(),
    "tracked": lambda: Z.clone().requires_grad_(),
    "a view of real pairs": lambda: torch.view_as_complex(torch.view_as_real(Z)),
}


class Named(torch.Tensor):
    """A subclass that does nothing of its own."""


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def plain(x: torch.Tensor) -> torch.Tensor:
    """The same values, in memory of their own."""
    return torch.tensor(x.detach().resolve_conj().resolve_neg().numpy().copy())


def result(use: Use, x: torch.Tensor) -> Any:
    found = outcome(use, World(gt, healthy(gt), x))
    return [np.array(str(found))] if isinstance(found, Exception) else leaves(gt, found)


@pytest.mark.parametrize("use", [u for u in MINE if u.name != "measure"], ids=str)
def test_a_view_gives_what_a_copy_of_it_gives_and_is_left_alone(use):
    for name, make in {**TENSORS, **COMPLEX}.items():
        x = make()
        expected = result(use, plain(x))
        before, memory = everything(), bits(x)
        found = result(use, x)
        assert changes(before, everything()) == [], name
        assert bits(x) == memory, name
        if (use.name, name) in REFUSED:
            assert REFUSED[use.name, name] in str(found[0])
        else:
            assert_same(found, expected)


# A captured tensor, and a dual number's primal, are PyTorch's own to refuse.
REFUSED = {
    ("microbatched", "made in inference mode"): "Inference tensors cannot be saved for backward",
    ("functionalize", "made in inference mode"): "Inference tensors cannot be saved for backward",
    ("frozen: second order", "expanded"): "refers to a single memory location",
}


@pytest.mark.parametrize("use", MINE, ids=str)
def test_on_the_meta_device_a_use_gives_shapes_or_says_that_there_are_no_values(use):
    wanted = outcome(use, World(gt, healthy(gt), P.clone()))
    x = P.to("meta")
    outcome(use, World(gt, healthy(gt), x))  # PyTorch imports, and changes, much at the first time
    before = everything()
    found = outcome(use, World(gt, healthy(gt), x))
    assert changes(before, everything()) == []
    if use.name in NO_VALUES:
        assert isinstance(found, GradtoolsError)
        assert NO_VALUES[use.name] in str(found)
    elif isinstance(wanted, torch.Tensor) and use.public not in ("key", "split"):
        assert (found.device.type, found.shape, found.dtype) == ("meta", wanted.shape, wanted.dtype)
    else:
        assert not isinstance(found, BaseException)


NO_VALUES = {
    "asarray": "to_numpy: a Tensor of shape (4,) has no values that NumPy could read",
    "to_numpy": "to_numpy: a Tensor of shape (4,) has no values that NumPy could read",
    "why_zero": "why_zero: the gradient is on the meta device, which holds no numbers",
    "formula": "has no values",
}
