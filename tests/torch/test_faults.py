"""What only PyTorch has: odd tensors, hooks that raise, modes around a call, the meta device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradtools.torch as gt
from tests.support.every_operator import POINT, USES, Use, World, healthy, leaves
from tests.support.state_of_process import bits, changes, everything
from tests.testing import test_faults as shared
from tests.testing import test_faults_arrays as arrays
from tests.testing import test_faults_places as places
from tests.testing.test_faults import FAULTS, Planted, outcome
from tests.testing.test_faults_arrays import assert_same

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
    return torch.tensor(x.detach().resolve_conj().resolve_neg().cpu().numpy().copy())


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


# A captured tensor, and a dual number's primal, are PyTorch's own to refuse.
REFUSED = {
    (
        "microbatched_value_and_grad",
        "made in inference mode",
    ): "Inference tensors cannot be saved for backward",
    ("make_functional", "made in inference mode"): "Inference tensors cannot be saved for backward",
}


# --- what the shared table leaves out here: it needs a process group, or seconds to compile -----


@pytest.fixture
def alone():
    """A group of one process."""
    dist = torch.distributed
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(w: World) -> Any:
    return w.gt.grad(lambda x: torch.sum(w.part(w.gt.all_gather(w.part(x) * 0.5)).real))


def compiled(w: World) -> Any:
    return w.gt.compile(w.gt.grad(w.loss), backend="aot_eager")


def derived(w: World) -> Any:
    """A gradient of what is compiled."""
    return w.gt.grad(w.gt.compile(w.loss, backend="aot_eager"))


def survives_faults(use: Use) -> None:
    for fault in FAULTS:
        shared.test_a_fault_at_any_call_reaches_the_user_and_leaves_nothing_behind(
            use, fault, gt, "torch"
        )


def takes_unusual_arrays(use: Use) -> None:
    arrays.test_an_odd_value_in_one_entry_changes_no_other_and_is_not_swallowed(use, gt, "torch")
    for shape in ((0,), (0, 3)):
        assert result(use, torch.zeros(shape, dtype=torch.float64))[0].shape == shape
    for view in ("every second entry", "with an offset", "a negative view", "expanded"):
        assert_same(result(use, TENSORS[view]()), result(use, plain(TENSORS[view]())))


def is_the_plain_gradient_of_complex_arrays(use: Use) -> None:
    w = World(gt, healthy(gt), torch.complex(P, P.flip(0)))
    expected = gt.grad(w.loss)(w.x)
    assert expected.imag.abs().min() > 0.1
    torch.testing.assert_close(use.run(w), expected, rtol=1e-14, atol=0)


def is_right_in_many_threads(use: Use) -> None:
    made_once = use.make(World(gt, healthy(gt), P))
    places.test_many_threads_at_once_each_get_what_they_would_alone(
        Use(use.name, lambda w: made_once), gt, "torch"
    )


CHECKS = (
    survives_faults,
    takes_unusual_arrays,
    is_the_plain_gradient_of_complex_arrays,
    is_right_in_many_threads,
)
APART = (
    Use("all_gather", gathered),
    Use("compile", compiled),
    Use("grad: of compile", derived),
)


@pytest.mark.sweep_at("compile", "grad: of compile")
@pytest.mark.filterwarnings("ignore:compile. loss is run again outside")
@pytest.mark.parametrize("use", APART, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_gather_and_compiled_functions_are_as_all_others(check, use, alone):
    check(use)


# --- hooks that raise, modes around the call -----------------------------------------------


def raising(*given: Any) -> None:
    raise Planted("planted by the test")


class Net(torch.nn.Module):
    """A layer whose buffers change and whose draws come from the global stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        ).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


HOOKS = {
    "forward": lambda net: net.layers[2].register_forward_hook(raising),
    "forward before": lambda net: net.layers[2].register_forward_pre_hook(raising),
    "backward": lambda net: net.layers[0].register_full_backward_hook(raising),
    "of a parameter": lambda net: net.layers[0].weight.register_hook(raising),
}
STEPS = {
    "grad": lambda net, x: gt.grad(lambda x: net(x).sum() ** 2)(x),
    "vjp": lambda net, x: gt.vjp(net, x)[1](x),
    "chunked": lambda net, x: (gt.chunked(net, 3)(x) ** 2).sum().backward(),
    "chunked: none retained": lambda net, x: (gt.chunked(net, 3)(x) ** 2).sum().backward(),
}


def held(net: torch.nn.Module) -> list[Any]:
    """All that a step may change behind its back, in a backward pass: nothing."""
    named = [*net.named_parameters(), *net.named_buffers()]
    return [(name, bits(x)) for name, x in named]


@pytest.mark.filterwarnings("ignore:chunked. BatchNorm1d is a batch normalization")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("step", STEPS)
def test_a_hook_that_raises_reaches_the_user_and_leaves_the_model_alone(step, hook):
    """After a failing forward pass f's own effects stay, those of the layers that ran."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(6, 4, dtype=torch.float64)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    STEPS["grad"](net, x)
    handle = HOOKS[hook](net)
    gradients = [bits(p.grad) for p in net.parameters()]
    before, state = everything(), held(net)
    try:
        STEPS[step](net, x)
    except Planted:
        ended = True
    else:
        ended = False
    asks_for_parameters = step.startswith("chunked")
    assert ended or (hook == "of a parameter" and not asks_for_parameters)
    if (hook, asks_for_parameters) != ("of a parameter", True):  # the engine wrote some before
        assert [bits(p.grad) for p in net.parameters()] == gradients
        left = [name for (name, a), (_, b) in zip(state, held(net), strict=True) if a != b]
        assert all("running" in name or "batches" in name for name in left)
    assert [c for c in changes(before, everything()) if "PyTorch's random stream" not in c] == []
    handle.remove()
    STEPS[step](net, x)


class Flag:
    """A flag that is on inside."""

    def __init__(self, get: Any, put: Any) -> None:
        self.get, self.put = get, put

    def __enter__(self) -> None:
        self.before = self.get()
        self.put(True)

    def __exit__(self, *error: Any) -> None:
        self.put(self.before)


ELSEWHERE = "a default device elsewhere"
MADE_THERE = ("asarray", "random_key", "split_key")  # these make arrays where the default says
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
    ELSEWHERE: lambda: torch.device("meta"),  # which any machine has; arrays made there hold none
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


# What f captures was made in inference mode, and is PyTorch's own to refuse.
INSIDE = {
    (
        "microbatched_value_and_grad",
        "inference mode",
    ): "Inference tensors cannot be saved for backward",
    ("make_functional", "inference mode"): "Inference tensors cannot be saved for backward",
}


def test_a_backward_pass_inside_inference_mode_computes_its_chunks_again_with_a_graph():
    """It gave zeros in silence for what was computed again there."""
    x = P.clone().requires_grad_()
    f = lambda x: torch.sin(x) + x * x
    for again in (gt.chunked(f, 2), gt.chunked(f, 2), gt.frozen(f)):
        value = again(x).sum()
        with torch.inference_mode():
            (found,) = torch.autograd.grad(value, x)
            (pulled,) = gt.vjp(again, x)[1](x)
        torch.testing.assert_close(found, torch.cos(P) + 2 * P, rtol=1e-14, atol=0)
        torch.testing.assert_close(pulled, P * (torch.cos(P) + 2 * P), rtol=1e-14, atol=0)
