"""Tests transformers models: the Trainer, per-example gradients and lost gradients."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.support.integration_models import (
    agree,
    bert,
    contrastive,
    gradients,
    pooled,
    quiet,
    tokens,
)

pytestmark = [pytest.mark.integration, pytest.mark.torch]
BATCH, OTHERS = tokens(6, seed=1), tokens(6, seed=2)


class Towers(torch.nn.Module):
    """Two towers that share an encoder, which optionally runs in chunks with `gt.chunked`."""

    def __init__(self, chunk_size=None):
        super().__init__()
        encoder = bert()
        self.encoder = encoder if chunk_size is None else gt.chunked(encoder, chunk_size)
        self.scale = torch.nn.Parameter(torch.tensor(5.0))

    def forward(self, input_ids, attention_mask, passage_ids, passage_mask, **rest):
        queries = pooled(self.encoder(input_ids, attention_mask=attention_mask), attention_mask)
        there = self.encoder(input_ids=passage_ids, attention_mask=passage_mask)
        return {"loss": contrastive(queries, pooled(there, passage_mask), self.scale)}


class InLoop(Towers):
    """Two towers whose encoder runs in an explicit loop over chunks, which saves all graphs."""

    def forward(self, input_ids, attention_mask, passage_ids, passage_mask, **rest):
        def encode(ids, mask):
            pairs = zip(ids.split(4), mask.split(4), strict=True)
            return torch.cat([pooled(self.encoder(i, attention_mask=m), m) for i, m in pairs])

        queries, passages = encode(input_ids, attention_mask), encode(passage_ids, passage_mask)
        return {"loss": contrastive(queries, passages, self.scale)}


def rows():
    """Return the training examples of the two towers."""
    a, b = tokens(24, seed=3), tokens(24, seed=4)
    columns = {**a, "passage_ids": b["input_ids"], "passage_mask": b["attention_mask"]}
    return [{name: x[i] for name, x in columns.items()} for i in range(24)]


def trained(model, folder, bf16):
    """Return the losses and the parameters after training with the Trainer."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=6,
        num_train_epochs=1,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=bf16,
        seed=7,
        max_grad_norm=1.0,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    with quiet():
        trainer = Trainer(model=model, args=args, train_dataset=rows())
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_two_towers_in_the_trainer_learn_what_the_loop_learns(tmp_path, bf16):
    losses, params = trained(Towers(4), tmp_path / "ours", bf16)
    expected, others = trained(InLoop(), tmp_path / "loop", bf16)
    assert len(losses) == 4
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    agree(params, others, rtol=1e-4, atol=1e-5 if not bf16 else 2e-4)


def test_a_model_is_loaded_from_what_was_saved_with_chunks(tmp_path):
    ours = Towers(4)
    torch.save(ours.state_dict(), tmp_path / "model.pt")
    plain = InLoop()
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    again = torch.load(_saved(ours, tmp_path), weights_only=False)
    torch.manual_seed(1)
    expected = ours.eval()(**_columns())["loss"]
    torch.testing.assert_close(plain.eval()(**_columns())["loss"], expected)
    torch.testing.assert_close(again.eval()(**_columns())["loss"], expected)


def _saved(model, folder):
    torch.save(model, folder / "whole.pt")
    return folder / "whole.pt"


def _columns():
    passages = {"passage_ids": OTHERS["input_ids"], "passage_mask": OTHERS["attention_mask"]}
    return {**BATCH, **passages}


def test_one_gradient_for_each_example_of_a_padded_batch():
    """vmap does not support the check in transformers whether all mask entries are ones."""
    model = bert().eval()
    apply, params, state = gt.make_functional(model)

    def loss(params, input_ids, attention_mask):
        out, _ = apply(params, state, input_ids[None], attention_mask=attention_mask[None])
        return out.last_hidden_state[0, 0].square().sum()

    with pytest.raises(GradtoolsError, match="chunk_size=1"):
        gt.per_example_grad(loss)(params, **BATCH)
    found = gt.per_example_grad(loss, chunk_size=1)(params, **BATCH)
    for i in range(6):
        model.zero_grad()
        one = {name: x[i : i + 1] for name, x in BATCH.items()}
        model(**one).last_hidden_state[0, 0].square().sum().backward()
        expected = gradients(model)
        agree({name: found[name][i] for name in expected}, expected)
    plain = lambda params, ids: loss(params, ids, torch.ones_like(ids))
    ids = BATCH["input_ids"]
    looped = gt.per_example_grad(plain, chunk_size=1)(params, ids)
    unmasked = lambda params, ids: apply(params, state, ids[None])[0].last_hidden_state[0, 0]
    mapped = gt.per_example_grad(lambda p, ids: unmasked(p, ids).square().sum())(params, ids)
    agree(mapped, looped)


def test_a_lost_gradient_in_a_classifier_is_named():
    """The pooled state is detached by mistake, so the encoder gets no gradient."""
    model, head = bert().eval(), torch.nn.Linear(16, 2)
    labels = torch.tensor([0, 1, 0, 1, 0, 1])

    def loss(input_ids, attention_mask):
        out = model(input_ids, attention_mask=attention_mask)
        state = pooled(out, attention_mask).detach()  # the mistake
        return torch.nn.functional.cross_entropy(head(state), labels)

    report = gt.why_zero(lambda: loss(*BATCH.values()), model={"bert": model, "head": head})
    places = {(f.kind, f.source.file) for f in report if f.source}
    assert places == {("detached", __file__)}
    assert not any("head" in f.argument for f in report)
