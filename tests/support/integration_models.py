"""Defines small models and batches for the integration tests, without downloads."""

from __future__ import annotations

import warnings

import torch

TOLERANCE = {"rtol": 2e-4, "atol": 1e-6}


def bert(**options):
    """Return a BERT model with two layers and the default dropout."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(intermediate_size=32, max_position_embeddings=32, **sizes, **options)
    return BertModel(config)


def tokens(rows, length=7, seed=0):
    """Return token ids and an attention mask, as a tokenizer with padding does."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 60, (rows, length), generator=generator)
    lengths = torch.randint(3, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def pooled(out, mask):
    """Return the mean over the tokens that are not padding."""
    mask = mask[..., None].to(out.last_hidden_state.dtype)
    return (out.last_hidden_state * mask).sum(1) / mask.sum(1)


def contrastive(queries, passages, scale):
    """Return the contrastive loss of queries and passages; query i matches passage i."""
    normal = torch.nn.functional.normalize
    scores = normal(queries, dim=-1) @ normal(passages, dim=-1).T * scale
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(queries)))


def gradients(module):
    """Return the gradients of the parameters by name."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def agree(found, expected, **tolerance):
    """Assert that two dicts of tensors are equal up to a tolerance."""
    assert found.keys() == expected.keys() and found
    for name, x in found.items():
        torch.testing.assert_close(
            x, expected[name], **(tolerance or TOLERANCE), msg=lambda text, n=name: f"{n}: {text}"
        )


def quiet():
    """Return a context manager that suppresses all warnings."""
    return warnings.catch_warnings(action="ignore")
