"""Gradient reversal layers return their input and multiply its gradient by -scale."""

import numpy as np
import pytest

from gradtools import GradtoolsError


def gradient_in_torch(layer, *args):
    import torch

    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    y = layer(x, *args)
    (dx,) = torch.autograd.grad((y * torch.tensor([1.0, 2.0, 4.0])).sum(), x)
    return y.detach().numpy(), dx.numpy()


def gradient_in_jax(layer, *args):
    import jax
    import jax.numpy as jnp

    x = jnp.array([1.0, -2.0, 3.0])
    y, pullback = jax.vjp(lambda x: layer(x, *args), x)
    return np.asarray(y), np.asarray(pullback(jnp.array([1.0, 2.0, 4.0]))[0])


def torch_case():
    torch = pytest.importorskip("torch")
    from gradtools.torch.nn import GradientReversal

    layers = GradientReversal(), GradientReversal(scale=0.5)
    assert not list(layers[1].parameters()) and not layers[1].state_dict()
    return gradient_in_torch, *layers, torch.tensor(3.0)


def linen_case():
    pytest.importorskip("flax.linen")
    from gradtools.jax.linen import GradientReversal

    assert not GradientReversal().init({}, np.ones(2, np.float32))
    layers = [
        lambda x, *args, layer=layer: layer.apply({}, x, *args)
        for layer in (GradientReversal(), GradientReversal(scale=0.5))
    ]
    return gradient_in_jax, *layers, 3.0


def nnx_case():
    nnx = pytest.importorskip("flax.nnx")
    import jax

    from gradtools.jax.nnx import GradientReversal

    layers = GradientReversal(), GradientReversal(scale=0.5)
    assert not jax.tree.leaves(nnx.state(layers[1]))
    return gradient_in_jax, *layers, 3.0


def equinox_case():
    pytest.importorskip("equinox")
    import jax

    from gradtools.jax.equinox import GradientReversal

    layers = GradientReversal(), GradientReversal(scale=0.5)
    assert not jax.tree.leaves(layers[1])
    return gradient_in_jax, *layers, 3.0


@pytest.fixture(params=[torch_case, linen_case, nnx_case, equinox_case], ids=lambda f: f.__name__)
def case(request):
    return request.param()


def test_the_gradient_is_reversed_by_the_layers_scale_or_that_of_the_call(
    case,
):
    gradient, plain, half, three = case
    value, dx = gradient(plain)
    np.testing.assert_array_equal(value, [1, -2, 3])
    np.testing.assert_array_equal(dx, [-1, -2, -4])
    for args, expected in (((), [-0.5, -1, -2]), ((three,), [-3, -6, -12]), ((0.0,), [0, 0, 0])):
        np.testing.assert_array_equal(gradient(half, *args)[1], expected)


def test_a_layer_refuses_a_negative_scale():
    layers = [
        pytest.importorskip(f"gradtools.{name}")
        for name in ("torch.nn", "jax.linen", "jax.nnx", "jax.equinox")
    ]
    for layer in layers:
        with pytest.raises(GradtoolsError, match=r"GradientReversal: scale is -1.0; it must not"):
            layer.GradientReversal(-1.0)


def test_a_scheduled_scale_is_traced_under_jit():
    pytest.importorskip("flax.nnx")
    import jax
    import jax.numpy as jnp

    from gradtools.jax.nnx import GradientReversal

    traces = []

    @jax.jit
    def step(s):
        traces.append(None)
        return jax.grad(lambda x: GradientReversal()(x, s).sum())(jnp.ones(2))

    np.testing.assert_array_equal(step(2.0), [-2, -2])
    np.testing.assert_array_equal(step(5.0), [-5, -5])
    assert len(traces) == 1


def test_the_torch_layers_scale_may_be_scheduled_by_assignment():
    pytest.importorskip("torch")
    from gradtools.torch.nn import GradientReversal

    layer = GradientReversal()
    layer.scale = 7.0
    np.testing.assert_array_equal(gradient_in_torch(layer)[1], [-7, -14, -28])
    assert "scale=7.0" in repr(layer)
