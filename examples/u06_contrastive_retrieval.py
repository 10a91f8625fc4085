"""Trains a pretrained sentence encoder to retrieve documentation, with the memory of one chunk.

A query is the signature of a function of the standard library, and its document is the first
paragraph of the docstring without the function's name. The loss (symmetric InfoNCE with a learned
temperature) compares every query of the batch with every document, so it is not a sum over
examples. `chunked` runs the unchanged MiniLM encoder with dropout, once for the queries and once
for the documents. In PyTorch the encoder is the module of sentence-transformers, and in JAX it is
the same network in flax. All layers except the embeddings are trained.

With --quick the program uses fewer pairs and steps.
"""

import functools
import importlib
import inspect
import re
import sys

import minilm
import numpy as np
from checks import peak_bytes
from common import claim, difference, main

LENGTH = 16  # tokens of a query or document
RATE, SCALE_RATE, DECAY, SCALE = 2e-4, 0.05, 0.01, 20.0
QUICK = "--quick" in sys.argv
BATCH, CHUNK, STEPS, HELD_OUT = (48, 8, 2, 96) if QUICK else (128, 16, 3, 160)
MODULES = """
argparse ast base64 bisect bz2 calendar cmath codecs colorsys contextlib copy csv dataclasses
datetime difflib dis email.utils enum filecmp fileinput fnmatch functools gc getpass gettext glob
gzip hashlib heapq hmac html imaplib importlib.util io ipaddress itertools json linecache
locale lzma math mimetypes os os.path pathlib pickle pkgutil platform plistlib pprint
py_compile quopri random re reprlib secrets shlex shutil signal site socket statistics string struct
subprocess sys sysconfig tarfile tempfile textwrap threading time timeit token tokenize trace
traceback tracemalloc types typing unicodedata unittest.mock urllib.parse urllib.request uuid
warnings wave weakref xml.etree.ElementTree xml.sax.saxutils zipfile zlib
"""


def show(gt, backend):
    absent = minilm.missing(backend)
    if absent:
        print(f"  left out: {', '.join(absent)} not installed; pip install --group demo")
        return {}
    texts = pairs()
    order = np.random.default_rng(0).permutation(len(texts))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    batches = [training[i : i + BATCH] for i in range(0, len(training) - BATCH + 1, BATCH)][:STEPS]
    tokens = [minilm.tokenized(column, LENGTH) for column in zip(*texts, strict=True)]
    rows = lambda index: [gt.asarray(x[index]) for tower in tokens for x in tower]
    print(f"  {len(texts)} functions, {HELD_OUT} held out; {len(batches)} steps of {BATCH} pairs")

    side = {"torch": _Torch, "jax": _Jax}[backend](gt)
    gradient = exact_gradient(side, rows(training[: 6 if QUICK else 12]))
    memory(side, rows(batches[0]))
    before = recall(side, rows(held_out))
    losses = [side.step(rows(batch), seed) for seed, batch in enumerate(progress(batches))]
    after = recall(side, rows(held_out))
    print(f"  loss {', '.join(f'{x:.3f}' for x in losses)}")
    found = ", ".join(
        f"recall@{k} from {was:.1%} to {now:.1%}"
        for k, was, now in zip((1, 5), before, after, strict=True)
    )
    claim(f"{found}; temperature 1/{side.scale():.2f}", sum(after) > sum(before))
    return gradient


# --- shared by both sides


def contrastive(gt, log_scale, queries, documents):
    """Computes InfoNCE in both directions, over documents and over queries."""
    xp = gt.xp
    logits = xp.exp(log_scale) * (queries @ documents.T)
    own = xp.mean(xp.sum(queries * documents, axis=1)) * xp.exp(log_scale)
    others = [xp.mean(xp.log(xp.sum(xp.exp(logits), axis=axis))) for axis in (0, 1)]
    return sum(others) / 2 - own


def exact_gradient(side, batch):
    """Compares the gradients with and without chunks of 4, in float64 and without dropout."""
    chunked, plain = (by_layer(side.exact(batch, chunk_size)) for chunk_size in (4, None))
    apart = max(difference(x, plain[layer]) for layer, x in chunked.items())
    claim(
        f"the gradient of chunked differs from the full batch's gradient by {apart:.1e}",
        apart < 1e-9,
    )
    return {layer: side.gt.asarray(x) for layer, x in chunked.items()}


def by_layer(gradient):
    """Returns one vector per layer, since the gradient of one array may be only rounding error."""
    found = {}
    for name, x in sorted(gradient.items()):
        found.setdefault(re.match(r"encoder\.layer\.\d", name)[0], []).append(x.ravel())
    return {layer: np.concatenate(parts) for layer, parts in found.items()}


def memory(side, batch):
    plain, chunked = (side.bytes_of_a_step(batch, chunk) / 1e6 for chunk in (None, CHUNK))
    claim(
        f"a step needs {chunked:.0f} MB in chunks of {CHUNK}, {plain:.0f} MB with the full batch",
        chunked < plain / 2,
    )


def recall(side, batch):
    """Returns recall@1 and recall@5 of each query's own document."""
    queries, documents = side.embed(batch)
    scores = queries @ documents.T
    better = (scores > np.diag(scores)[:, None]).sum(axis=1)
    return [float((better < k).mean()) for k in (1, 5)]


def progress(steps):
    """Returns the steps, with a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        return steps
    from tqdm import tqdm

    return tqdm(steps, unit="step", leave=False, disable=None)


# --- PyTorch


class _Torch:
    """Trains the sentence-transformers module with loss.backward() and AdamW."""

    def __init__(self, gt):
        import torch

        self.gt, self.torch = gt, torch
        torch.manual_seed(0)
        self.model, self.encode = minilm.torch_encoder()
        self.log_scale = torch.tensor(np.log(SCALE), dtype=torch.float32, requires_grad=True)
        self.model[0].model.embeddings.requires_grad_(False)
        groups = [
            {"params": self.model.parameters()},
            {"params": [self.log_scale], "lr": SCALE_RATE},
        ]
        self.adam = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)

    def loss(self, batch, chunk_size):
        encode = self.encode
        if chunk_size:
            encode = self.gt.chunked(encode, chunk_size)
        return contrastive(self.gt, self.log_scale, encode(*batch[:2]), encode(*batch[2:]))

    def step(self, batch, seed):
        self.torch.manual_seed(seed)
        self.model.train()
        loss = self.loss(batch, CHUNK)
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        return loss.item()

    def embed(self, batch):
        self.model.eval()
        with self.torch.no_grad():
            return [self.encode(*batch[i : i + 2]).numpy() for i in (0, 2)]

    def exact(self, batch, chunk_size):
        self.model.eval().double()
        self.loss(batch, chunk_size).backward()
        named = self.model[0].model.encoder.named_parameters()
        found = {f"encoder.{name}": parameter.grad.numpy() for name, parameter in named}
        self.adam.zero_grad()
        self.model.float()
        return found

    def bytes_of_a_step(self, batch, chunk_size):
        """Returns the peak memory of a forward and backward pass."""
        self.model.train()
        with peak_bytes() as peak:
            self.loss(batch, chunk_size).backward()
        self.adam.zero_grad()
        return peak.most

    def scale(self):
        return self.log_scale.exp().item()


# --- JAX


class _Jax:
    """Trains the flax module with optax; each step is one compiled program."""

    def __init__(self, gt):
        import jax
        import optax

        self.gt, self.jax, self.optax = gt, jax, optax
        params = jax.tree.map(gt.asarray, minilm.as_params(minilm.arrays()))
        self.embeddings, trained = params["embeddings"], {"layers": params["layers"]}
        self.everything = trained, gt.asarray(np.float32(np.log(SCALE)))
        module = minilm.flax_encoder()
        self.applied = {
            train: gt.make_functional(module, variables={"params": params}, train=train)
            for train in (True, False)
        }
        self.adam = [optax.adamw(rate, weight_decay=DECAY) for rate in (RATE, SCALE_RATE)]
        self.state = [adam.init(x) for adam, x in zip(self.adam, self.everything, strict=True)]
        self.encode = jax.jit(self.encoder(train=False))
        self.programs = {}

    def encoder(self, train):
        apply, _, state = self.applied[train]

        def encode(trained, ids, mask, key):
            dtype = trained["layers"]["output"]["bias"].dtype
            embeddings = self.jax.tree.map(lambda x: x.astype(dtype), self.embeddings)
            return apply({"embeddings": embeddings, **trained}, state, ids, mask, key=key)[0]

        return encode

    def loss(self, params, log_scale, batch, key, chunk_size=CHUNK, train=True):
        encode = self.encoder(train)
        if chunk_size:
            axes = None, 0, 0, None
            encode = self.gt.chunked(encode, chunk_size, axes, key_argnums=3)
        towers = zip((batch[:2], batch[2:]), self.gt.split_key(key), strict=True)
        outs = [encode(params, *tower, key) for tower, key in towers]
        return contrastive(self.gt, log_scale, *outs)

    def one_step(self, chunk_size, everything, state, batch, key):
        loss = lambda *everything: self.loss(*everything, batch, key, chunk_size)
        value, grads = self.gt.value_and_grad(loss, argnums=(0, 1))(*everything)
        triples = zip(self.adam, grads, state, everything, strict=True)
        moved = [adam.update(g, s, x) for adam, g, s, x in triples]
        everything = self.optax.apply_updates(everything, tuple(move for move, _ in moved))
        return everything, [s for _, s in moved], value

    def compiled(self, batch, chunk_size):
        if chunk_size not in self.programs:
            with self.single_precision():
                step = self.jax.jit(functools.partial(self.one_step, chunk_size))
                lowered = step.lower(self.everything, self.state, batch, self.gt.random_key(0))
                self.programs[chunk_size] = lowered.compile()
        return self.programs[chunk_size]

    def step(self, batch, seed):
        program = self.compiled(batch, CHUNK)
        with self.single_precision():
            found = program(self.everything, self.state, batch, self.gt.random_key(seed))
        self.everything, self.state, value = found
        return float(value)

    def embed(self, batch):
        towers = batch[:2], batch[2:]
        with self.single_precision():
            return [
                np.asarray(self.encode(self.everything[0], *t, self.gt.random_key(0)))
                for t in towers
            ]

    def exact(self, batch, chunk_size):
        params = self.jax.tree.map(lambda x: x.astype(np.float64), self.everything[0])
        log_scale, key = self.everything[1], self.gt.random_key(0)
        loss = lambda params: self.loss(params, log_scale, batch, key, chunk_size, False)
        return minilm.as_arrays(self.jax.jit(self.gt.grad(loss))(params))

    def bytes_of_a_step(self, batch, chunk_size):
        """Returns the temporary bytes of the compiled step, without running it."""
        return self.compiled(batch, chunk_size).memory_analysis().temp_size_in_bytes

    def single_precision(self):
        """Returns a context manager for JAX's default precision (examples use double precision)."""
        return self.jax.enable_x64(False)

    def scale(self):
        return float(self.gt.xp.exp(self.everything[1]))


# --- the pairs


@functools.cache
def pairs():
    """Returns a query and a document for each documented function, without duplicates."""
    found, names = {}, set()
    for module in map(importlib.import_module, MODULES.split()):
        for name, function in sorted(vars(module).items()):
            document = described(module.__name__, name, function)
            if document and document not in found and name not in names:
                names.add(name)
                found[document] = f"{module.__name__}.{name}{signature(function)}"
    return [(query, document) for document, query in found.items()]


def described(module, name, function):
    """Returns a docstring's first paragraph without the function's name, or None if unsuitable."""
    home = getattr(function, "__module__", None)
    if name[0] == "_" or not inspect.isroutine(function):
        return None
    if home not in (module, f"_{module}", "posixpath") or not signature(function):
        return None
    paragraph = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    masked = re.sub(rf"\b{re.escape(name)}\b(\(.*?\))?", "", paragraph, flags=re.IGNORECASE)
    masked = masked.lstrip(" ->.:")
    return masked if len(masked.split()) > 3 and ">>>" not in masked else None


def signature(function):
    try:
        return re.sub(r"<(?:\w+ )?(\S+).*?>", r"\1", str(inspect.signature(function)))
    except (ValueError, TypeError):
        return None


if __name__ == "__main__":
    if QUICK:
        sys.argv.remove("--quick")
    main(show, tolerance=1e-9)
