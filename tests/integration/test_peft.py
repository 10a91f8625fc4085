"""Tests SimCLR training of the low-rank adapters of an encoder with peft."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

peft = pytest.importorskip("peft", reason="peft is not installed")
from tests.support.integration_models import agree, bert, contrastive, gradients, pooled, tokens

pytestmark = [pytest.mark.integration, pytest.mark.torch]
BATCH = tokens(10, seed=1)


def adapted():
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1)
    return peft.get_peft_model(bert(), config)


def views(encode, batch):
    """Encode the batch twice with different dropout masks; matching rows are positive pairs."""
    return [encode(**batch) for _ in range(2)]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_simclr_in_chunks_has_the_gradients_of_the_loop(bf16):
    model = adapted().train()
    head = torch.nn.Linear(16, 8)

    def encode(input_ids, attention_mask):
        out = model(input_ids=input_ids, attention_mask=attention_mask)
        return head(pooled(out, attention_mask))

    def in_loop(input_ids, attention_mask):
        pairs = zip(input_ids.split(4), attention_mask.split(4), strict=True)
        return torch.cat([encode(i, m) for i, m in pairs])

    found = []
    for way in (gt.chunked(encode, 4), in_loop):
        torch.manual_seed(3)
        model.zero_grad()
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = contrastive(*views(way, BATCH), torch.tensor(5.0))
        loss.backward()
        found.append({**gradients(model), **gradients(head), "loss": loss.detach()})
    names = [name for name in found[0] if "encoder" in name]
    assert names and all("lora_" in name for name in names)
    agree(*found, **({"rtol": 0.05, "atol": 2e-3} if bf16 else {}))
