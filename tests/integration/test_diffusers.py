"""Tests score distillation through a VAE, and second derivatives of a U-Net, with diffusers."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from tests.support.integration_models import agree

pytestmark = [pytest.mark.integration, pytest.mark.torch]
SIZE = {"block_out_channels": (8,), "norm_num_groups": 2}


def vae():
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        latent_channels=2,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        **SIZE,
    ).requires_grad_(False)


def denoiser():
    torch.manual_seed(1)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
        attention_head_dim=4,
        **SIZE,
    ).requires_grad_(False)


ENCODER, UNET = vae(), denoiser()
SCHEDULE = diffusers.DDPMScheduler(num_train_timesteps=100)
NOISE = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(2))
STEPS = torch.tensor([10, 40, 60, 90])
PICTURE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3)) / 3


def guided(latents):
    """Return the gradient of score distillation: the weighted error of the predicted noise."""
    with torch.no_grad():
        noisy = SCHEDULE.add_noise(latents, NOISE, STEPS)
        weight = (1 - SCHEDULE.alphas_cumprod[STEPS])[:, None, None, None]
        return weight * (UNET(noisy, STEPS).sample - NOISE)


def encode(x):
    return ENCODER.encode(x).latent_dist.mean


def by_backward(scale):
    """Compute the gradient of score distillation with `backward` and an explicit gradient."""
    scale = scale.clone().requires_grad_()
    latents = encode(PICTURE * scale)
    latents.backward(gradient=guided(latents))
    return scale.grad


def by_known_gradient(scale, encode=encode):
    def loss(scale):
        latents = encode(PICTURE * scale)
        return gt.replace_gradient(latents, guided(latents.detach())).sum()

    return gt.grad(loss)(scale)


def by_transformed_gradient(scale):
    def loss(scale):
        latents = encode(PICTURE * scale)
        return gt.transform_gradient(latents, lambda ct: ct * guided(latents.detach())).sum()

    return gt.grad(loss)(scale)


SCALE = torch.ones(1, 3, 1, 1)


@pytest.mark.parametrize("way", [by_known_gradient, by_transformed_gradient])
def test_score_distillation_through_the_vae(way):
    agree({"scale": way(SCALE)}, {"scale": by_backward(SCALE)})


def test_it_is_the_same_in_chunks():
    found = by_known_gradient(SCALE, gt.chunked(encode, 2))
    agree({"scale": found}, {"scale": by_backward(SCALE)}, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", ["reverse_over_reverse", "forward_over_reverse"])
def test_a_hessian_product_of_a_unet_with_attention(mode):
    net = denoiser().double()
    x, along = NOISE.double()[:2], NOISE.double()[2:]
    f = lambda x: net(x, STEPS[:2]).sample.square().mean()
    slope = lambda h: (gt.grad(f)(x + h * along) * along).sum()
    (product,) = gt.hvp(f, (x,), (along,), mode=mode)[1]
    expected = (slope(1e-5) - slope(-1e-5)) / 2e-5
    torch.testing.assert_close((product * along).sum(), expected, rtol=1e-6, atol=1e-10)


def test_the_divergence_of_a_score_is_had_in_forward_mode():
    """Compare Hutchinson's trace estimator in forward mode with the full Jacobian."""
    net = denoiser().double()
    x = NOISE.double()[:1, :, :4, :4]
    score = lambda x: net(x, STEPS[:1]).sample
    full = gt.jacobian(score, chunk_size=1)(x).reshape(32, 32)
    torch.testing.assert_close(gt.jacobian(score)(x).reshape(32, 32), full)
    vector = torch.sign(torch.randn(32, dtype=x.dtype)).reshape(x.shape)
    pushed = gt.jvp(score, (x,), (vector,))[1]
    torch.testing.assert_close(pushed.reshape(-1), full @ vector.reshape(-1))
