"""Tests operators in PyTorch with unusual tensors, inside of modes and on the meta device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradtools.torch as gt
from tests.support.every_operator import POINT, USES, Use, World, healthy, leaves
from tests.support.state_of_process import bits, changes, everything
from tests.testing.test_faults import outcome

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
    """A tensor subclass that overrides nothing."""


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor in newly allocated memory."""
    return torch.tensor(x.detach().resolve_conj().resolve_neg().cpu().numpy().copy())


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype.kind in "US":
            assert a.tolist() == b.tolist()
        else:
            # with other strides, PyTorch uses other kernels, whose rounding differs
            np.testing.assert_allclose(a, b, rtol=1e-15, atol=0)


def result(use: Use, x: torch.Tensor) -> Any:
    found = outcome(use, World(gt, healthy(gt), x))
    return [np.array(str(found))] if isinstance(found, Exception) else leaves(gt, found)


@pytest.mark.sampled(20, 53)
@pytest.mark.parametrize("use", MINE, ids=str)
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


# Errors that PyTorch itself raises for captured tensors created in inference mode.
REFUSED = {
    (
        "microbatched_value_and_grad",
        "made in inference mode",
    ): "Inference tensors cannot be saved for backward",
    ("make_functional", "made in inference mode"): "Inference tensors cannot be saved for backward",
}


# --- modes around the call -----------------------------------------------------------------


class Flag:
    """A context manager that sets a flag of the process and restores it."""

    def __init__(self, get: Any, put: Any) -> None:
        self.get, self.put = get, put

    def __enter__(self) -> None:
        self.before = self.get()
        self.put(True)

    def __exit__(self, *error: Any) -> None:
        self.put(self.before)


ELSEWHERE = "a default device elsewhere"
# these functions create arrays on the default device
MADE_THERE = ("asarray", "random_key", "split_key")
AROUND = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic algorithms": lambda: Flag(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "the default dtype": lambda: Flag(lambda: torch.float32, set_double),
    "one thread in autograd": lambda: torch.autograd.set_multithreading_enabled(False),
    # The meta device exists on every machine, and its tensors store no values.
    ELSEWHERE: lambda: torch.device("meta"),
}


def set_double(on: Any) -> None:
    torch.set_default_dtype(torch.float64 if on is True else torch.float32)


@pytest.mark.sampled(33, 61)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("use", MINE, ids=str)
def test_inside_any_mode_a_use_gives_the_same_and_the_mode_stays(use):
    expected = result(use, P.clone())
    for name, around in AROUND.items():
        if name == ELSEWHERE and use.name in MADE_THERE:
            continue
        with around():
            before = everything()
            found = result(use, P.clone())
            assert changes(before, everything()) == [], name
            if (use.name, name) in INSIDE:
                assert INSIDE[use.name, name] in str(found[0])
            else:
                assert_same(found, expected)


# Errors that PyTorch itself raises for captured tensors created in inference mode.
INSIDE = {
    (
        "microbatched_value_and_grad",
        "inference mode",
    ): "Inference tensors cannot be saved for backward",
    ("make_functional", "inference mode"): "Inference tensors cannot be saved for backward",
}


def test_a_backward_pass_inside_inference_mode_computes_its_chunks_again_with_a_graph():
    """In inference mode, recomputation used to return zeros without an error."""
    x = P.clone().requires_grad_()
    f = lambda x: torch.sin(x) + x * x
    for again in (gt.chunked(f, 2), gt.chunked(f, 2), gt.frozen(f)):
        value = again(x).sum()
        with torch.inference_mode():
            (found,) = torch.autograd.grad(value, x)
            (pulled,) = gt.vjp(again, x)[1](x)
        torch.testing.assert_close(found, torch.cos(P) + 2 * P, rtol=1e-14, atol=0)
        torch.testing.assert_close(pulled, P * (torch.cos(P) + 2 * P), rtol=1e-14, atol=0)
