"""Compares a chunked two-tower model in Lightning with a plain loop, in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
from tests.support.integration_models import agree, contrastive, quiet

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def tower():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Dropout(0.2)
    )


class Towers(lightning.LightningModule):
    """Two towers that share an encoder, which runs with `chunked` or in a loop over chunks."""

    def __init__(self, in_chunks):
        super().__init__()
        plain = tower()
        self.tower = gt.chunked(plain, 4) if in_chunks else plain
        self.scale = torch.nn.Parameter(torch.tensor(5.0))
        self.in_chunks, self.losses = in_chunks, []

    def encode(self, x):
        return self.tower(x) if self.in_chunks else torch.cat([self.tower(c) for c in x.split(4)])

    def training_step(self, batch, index):
        loss = contrastive(self.encode(batch[0]), self.encode(batch[1]), self.scale)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(folder, in_chunks, precision, **options):
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(*torch.randn(2, 30, 8, generator=generator))
    model = Towers(in_chunks)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **options,
    )
    with quiet():
        torch.manual_seed(5)
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=10))
    return model


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.5}],
    ids=["each batch", "accumulated", "clipped"],
)
def test_two_towers_learn_what_the_loop_over_chunks_learns(tmp_path, precision, options):
    ours, plain = (fitted(tmp_path, k, precision, **options) for k in (True, False))
    low = precision == "bf16-mixed"
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-2 if low else 1e-4, atol=1e-4)
    found, expected = (dict(m.state_dict()) for m in (ours, plain))
    agree(found, expected, rtol=1e-3, atol=2e-2 if low else 1e-5)
