"""`mixed_partial` through kernels without forward mode, and through functions with state."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtools.torch as gt
from gradtools import GradtoolsError, GradtoolsWarning, errors
from gradtools.torch import modes
from gradtools.torch.modes import Modes


def randn(*shape, seed=0):
    return torch.randn(
        *shape,
        generator=torch.Generator(torch.get_default_device()).manual_seed(seed),
        dtype=torch.float64,
    )


SAYS_SO = pytest.mark.filterwarnings("ignore::gradtools.GradtoolsWarning")
Y, Z, U, V = randn(8), randn(2, 5, 8, seed=1), randn(2, 5, 8, seed=2), randn(2, 5, 8, seed=3)


def f(y, g):
    return (torch.tanh(g * y) ** 2).sum()


def attention():
    def attend(z):
        heads = z[:, None]
        return functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]

    return attend


def encoder(dropout=0.0):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, dtype=Z.dtype)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def recurrent():
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8, batch_first=True)
    return lambda z: lstm(z.float())[0].double()


def by_double_backward(G, u):
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        slope = lambda y: (gt.grad(lambda z: f(y, G(z)))(Z) * u).sum()
        return gt.grad(slope)(Y).detach()


LACKING = {
    "attention": (attention, "scaled_dot_product_flash_attention", 1e-12),
    "an encoder": (lambda: encoder().eval(), "scaled_dot_product_flash_attention", 1e-12),
    "a frozen encoder": (
        lambda: encoder().eval().requires_grad_(False),
        "scaled_dot_product_flash_attention",
        1e-12,
    ),
    "an encoder in training": (encoder, "scaled_dot_product_flash_attention", 1e-12),
    "an LSTM": (recurrent, "mkldnn_rnn_layer", 1e-5),
}


@pytest.mark.parametrize("name", LACKING)
def test_another_kernel_takes_the_place_of_one_without_forward_mode(name, monkeypatch):
    make, kernel, tolerance = LACKING[name]
    monkeypatch.setattr(errors, "WARNED", set())
    G, switches = make(), Modes.now(()).flags
    with pytest.warns(GradtoolsWarning, match=rf"^mixed_partial: .*{kernel}.* has no forward mode"):
        found = gt.mixed_partial(f, G, Y, Z, U)
    assert Modes.now(()).flags == switches
    expected = by_double_backward(G, U)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max())
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradtoolsWarning)  # it is reported once
        again = gt.mixed_partial(f, G, Y, Z, [U, V])
    torch.testing.assert_close(again[0], found, rtol=0, atol=tolerance)


CUDA, MATMUL = torch.backends.cuda, getattr(torch.backends.mkldnn, "matmul", None)
FLAGS = {
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    "lean attention": (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
    "plain attention": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
    "cudnn attention": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(on),
    ),
    "warn only": (
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda on: torch.use_deterministic_algorithms(False, warn_only=on),
    ),
    "float32 products": (
        lambda: torch.get_float32_matmul_precision() == "highest",
        lambda on: torch.set_float32_matmul_precision("highest" if on else "high"),
    ),
    "products of oneDNN": (
        lambda: MATMUL.fp32_precision == "bf16",
        lambda on: setattr(MATMUL, "fp32_precision", "bf16" if on else "none"),
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_in_a_recomputation_as_it_was_in_the_first_pass(name):
    if name == "products of oneDNN" and MATMUL is None:
        pytest.skip("PyTorch has it from 2.9 on")
    read, put = FLAGS[name]
    before = read()
    first = Modes.now(())
    try:
        put(not before)
        assert not first.are_current()
        with first.restored():
            assert read() == before
        assert read() is not before
    finally:
        modes._set(modes._current_flags(), first.flags)  # one of them sets several
    assert first.are_current()


def test_flags_are_read_once_by_a_use_of_frozen_and_once_by_each_recomputation(monkeypatch):
    w, reads, current = randn(8, 8), [], modes._current_flags
    G = gt.frozen(lambda z: torch.tanh(z @ w))

    def differentiated_twice():
        z = randn(4, 8).requires_grad_()
        (slope,) = torch.autograd.grad((G(z) ** 2).sum(), z, create_graph=True)
        (slope**2).sum().backward()

    differentiated_twice()  # the first one also compares
    monkeypatch.setattr(modes, "_current_flags", lambda: reads.append(1) or current())
    differentiated_twice()
    assert len(reads) == 4  # the use, its pullback, its tangents, and those of its pullback


@SAYS_SO
def test_it_is_so_under_vmap():
    G = attention()
    one = lambda z, u: gt.mixed_partial(f, G, Y, z, u)
    rows = torch.vmap(one)(Z[:, None], U[:, None])
    torch.testing.assert_close(rows.sum(0), by_double_backward(G, U))


def test_an_operation_without_any_alternative_is_refused_in_its_own_name():
    G = lambda z: z * functional.multi_margin_loss(z[..., 0], torch.tensor([0] * len(z)))
    with pytest.raises(GradtoolsError, match=r"^mixed_partial: .*multi_margin_loss"):
        gt.mixed_partial(f, G, Y, Z, U)


@SAYS_SO
def test_g_runs_once_and_draws_what_one_plain_call_draws():
    module, calls = encoder(dropout=0.5), []
    plain = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=Z.dtype)

    def G(z):
        calls.append(None)
        return plain(module(z))  # the second one's fused kernel comes after random numbers

    torch.manual_seed(1)
    expected = by_double_backward(G, U)
    stood = torch.get_rng_state()
    calls.clear()
    torch.manual_seed(1)
    found = gt.mixed_partial(f, G, Y, Z, U)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert torch.equal(torch.get_rng_state(), stood)


@SAYS_SO
def test_random_numbers_of_an_operation_are_drawn_again():
    class Lacking(torch.overrides.TorchFunctionMode):
        """Draws, and then fails in forward mode where the fused kernel is allowed."""

        def __torch_function__(self, fun, types, args=(), kwargs=None):
            if fun is functional.scaled_dot_product_attention:
                scale = torch.rand(())
                if torch.backends.cuda.flash_sdp_enabled():
                    torch.ops.aten._cdist_forward(args[0], args[0], 2.0, None)  # which has none
                return args[0] * scale
            return fun(*args, **(kwargs or {}))

    G = lambda z: functional.scaled_dot_product_attention(z, z, z)
    torch.manual_seed(2)
    scale = torch.rand(())
    stood = torch.get_rng_state()
    torch.manual_seed(2)
    with Lacking():
        found = gt.mixed_partial(f, G, Y, Z, U)
    assert torch.equal(torch.get_rng_state(), stood)
    torch.testing.assert_close(found, gt.mixed_partial(f, lambda z: z * scale, Y, Z, U))


def test_several_directions_see_one_state_and_leave_it_as_one_evaluation_does():
    norm = nn.BatchNorm1d(5, dtype=Z.dtype)
    G = nn.Sequential(nn.Dropout(0.5), norm, nn.Tanh()).train()
    torch.manual_seed(3)
    one = gt.mixed_partial(f, G, Y, Z, U)
    stood, mean = torch.get_rng_state(), norm.running_mean.clone()
    norm.reset_running_stats()
    torch.manual_seed(3)
    many = gt.mixed_partial(f, G, Y, Z, [U, V, U])
    assert torch.equal(many[0], one) and torch.equal(many[2], one)
    assert not torch.equal(many[1], one)
    assert torch.equal(torch.get_rng_state(), stood)
    assert torch.equal(norm.running_mean, mean) and norm.num_batches_tracked == 1
