"""Tests chunked image models of timm, and compares derivatives with finite differences."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

timm = pytest.importorskip("timm", reason="needs timm: pip install --group integration")
from tests.support.integration_models import agree, gradients

pytestmark = [pytest.mark.integration, pytest.mark.torch]
IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
VIT = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 3,
}
MODELS = {
    "a vision transformer": lambda: timm.models.VisionTransformer(drop_rate=0.2, **VIT),
    "a residual network": lambda: timm.models.ResNet(
        timm.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3, stem_width=8, drop_rate=0.2
    ),
    "a mixer": lambda: timm.models.MlpMixer(
        img_size=32, patch_size=8, embed_dim=16, num_blocks=2, num_classes=3
    ),
    "a convnext": lambda: timm.models.ConvNeXt(
        depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), num_classes=3, drop_path_rate=0.2
    ),
}


def model(name):
    torch.manual_seed(0)
    return MODELS[name]()


def entropy(scores, labels):
    return torch.nn.functional.cross_entropy(scores, labels)


@pytest.mark.filterwarnings("ignore:chunked. .* batch normalization")
@pytest.mark.parametrize("name", MODELS)
def test_in_chunks_it_has_the_loss_gradients_and_statistics_of_the_loop(name):
    found = []
    for in_chunks in (True, False):
        net = model(name).train()
        chunked = gt.chunked(net, 2)
        run = chunked if in_chunks else lambda x, n=net: torch.cat([n(c) for c in x.split(2)])
        torch.manual_seed(1)
        loss = entropy(run(IMAGES), LABELS)
        loss.backward()
        buffers = {k: b.clone() for k, b in net.named_buffers() if b.is_floating_point()}
        found.append({**gradients(net), **buffers, "loss": loss.detach()})
    agree(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_slope_is_what_differences_say(name):
    """Compare derivatives of the loss and of its gradient with finite differences."""
    net = model(name).double().eval().requires_grad_(False)
    x = IMAGES[:2].double()
    along = x.flip(0)
    f = lambda x: entropy(net(x), LABELS[:2])
    difference = lambda g, h: (g(x + h * along) - g(x - h * along)) / (2 * h)
    slope = lambda x: (gt.grad(f)(x) * along).sum()
    torch.testing.assert_close(
        gt.jvp(f, (x,), (along,))[1], difference(f, 1e-6), rtol=1e-5, atol=1e-8
    )
    twice = [gt.hvp(f, (x,), (along,), mode=mode)[1][0]
             for mode in ("reverse_over_reverse", "forward_over_reverse")]  # fmt: skip
    torch.testing.assert_close(*twice, rtol=1e-6, atol=1e-9)
    expected = difference(slope, 1e-6 if "residual" not in name else 1e-7)
    torch.testing.assert_close((twice[0] * along).sum(), expected, rtol=1e-3, atol=1e-5)
