"""Compares chunked sentence-transformers models with a plain loop and with `model.encode`."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
from tests.support.integration_models import agree, bert, contrastive, gradients, quiet, tokens

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def encoder(folder):
    """Return a SentenceTransformer with random weights and a small vocabulary."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{i}" for i in range(55)]]
    (folder / "vocab.txt").write_text("\n".join(words))
    bert().save_pretrained(folder)
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    with quiet():
        parts = Transformer(str(folder)), Pooling(16)
        return st.SentenceTransformer(modules=parts, device="cpu")


def batch(seed):
    return tokens(10, seed=seed)


def test_a_sentence_encoder_in_chunks_has_the_gradients_of_the_loop(tmp_path):
    model = encoder(tmp_path)
    model.train()
    scale = torch.tensor(20.0)

    def embedded(encode):
        return contrastive(*[encode(dict(batch(seed)))["sentence_embedding"] for seed in (1, 2)],
                           scale)  # fmt: skip

    def in_loop(features):
        pieces = [{k: x[i : i + 4] for k, x in features.items()} for i in (0, 4, 8)]
        return {"sentence_embedding": torch.cat([model(p)["sentence_embedding"] for p in pieces])}

    found = []
    embedding = lambda x: {"sentence_embedding": model(x)["sentence_embedding"]}
    for encode in (gt.chunked(embedding, 4), in_loop):
        torch.manual_seed(2)
        model.zero_grad()
        loss = embedded(encode)
        loss.backward()
        found.append({**gradients(model), "loss": loss.detach()})
    agree(*found)


def test_what_it_encodes_is_encoded_in_chunks(tmp_path):
    model = encoder(tmp_path).eval()
    texts = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]
    features = model.tokenize(texts)
    found = gt.chunked(lambda x: model(x)["sentence_embedding"], 2)(dict(features))
    expected = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    torch.testing.assert_close(found, expected)
