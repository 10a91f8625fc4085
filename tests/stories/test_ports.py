"""Tests that `cross_check` accepts correct ports of PyTorch programs to JAX."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from gradtools.testing import AgreementError, cross_check, match_parameters

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy
WIDTH, HEADS = 8, 2


class _TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.fc = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(x + self.attn(x, x, x, need_weights=False)[0])


class _FlaxBlock(nnx.Module):
    def __init__(self):
        rngs, kind = nnx.Rngs(0), jnp.float64
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs, decode=False, param_dtype=kind)
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=kind)

    def __call__(self, x):
        return self.fc(x + self.attn(x))


def _port():
    """Return a block and its correct port with equal parameters."""
    torch.manual_seed(0)
    original, port = _TorchBlock().double(), _FlaxBlock()
    torch.nn.init.normal_(original.attn.in_proj_bias)
    array = lambda x: jnp.asarray(x.detach().numpy())
    size = WIDTH // HEADS
    for k, name in enumerate(("query", "key", "value")):
        rows, layer = slice(k * WIDTH, (k + 1) * WIDTH), getattr(port.attn, name)
        weight = array(original.attn.in_proj_weight[rows]).T
        layer.kernel[...] = weight.reshape(WIDTH, HEADS, size)
        layer.bias[...] = array(original.attn.in_proj_bias[rows]).reshape(HEADS, size)
    out = original.attn.out_proj
    port.attn.out.kernel[...] = array(out.weight).T.reshape(HEADS, size, WIDTH)
    port.attn.out.bias[...] = array(out.bias)
    port.fc.kernel[...] = array(original.fc.weight).T
    port.fc.bias[...] = array(original.fc.bias)
    return original, port


@pytest.mark.slow
def test_a_correct_port_with_attention_in_float32_is_told_so():
    """flax's attention accumulates in float32 even if x64 is enabled."""
    original, port = _port()
    x = np.random.default_rng(0).normal(size=(2, 5, WIDTH))
    mapping = match_parameters(original, port)
    with pytest.raises(AgreementError) as caught:
        cross_check(torch=original, jax=port, args=(x,), mapping=mapping, order=1)
    differing = [c for c in caught.value.report.comparisons if not c.agrees]
    assert all("float32 in jax from here on" in c.cause for c in differing)
    assert cross_check(
        torch=original, jax=port, args=(x,), mapping=mapping, order=1, dtype="float32"
    )


def test_warnings_as_errors_are_no_missing_derivative():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = cross_check(
            torch=lambda x: torch.tanh(x).sum(), jax=lambda x: jnp.tanh(x).sum(),
            args=(np.random.default_rng(0).normal(size=3),),
        )  # fmt: skip
    assert report and not report.left_out
