"""An encoder is trained on a contrastive loss over 16,384 pairs at once, on a CPU.

The data are functions in the sources of the standard library and of NumPy: the head (name and
arguments) is the query, the body the document; both are bags of letter trigrams. The loss compares
every query with every document, 268 million logits that are never in memory at once: the encoders
run in `chunked`, the loss is `contrastive_loss`. The training loop is the same in both frameworks.

With --quick there are fewer pairs and steps.
"""

import ast
import functools
import sys
import sysconfig
import zlib
from pathlib import Path

import numpy as np
from common import claim, main

QUICK = "--quick" in sys.argv
PAIRS, HELD_OUT, STEPS, TILE, CHUNK = (
    (1024, 256, 6, 128, 64) if QUICK else (16_384, 1_024, 6, 1_024, 512)
)
LETTERS, HIDDEN, WIDTH, RATE = 1_024, 128, 64, 0.01
MEASURED = min(PAIRS, 2_048)  # what the dense step takes grows with the square


def show(gt, backend):
    query, document = (gt.asarray(x) for x in pairs(PAIRS + HELD_OUT))
    held_out, batch = (
        [x[:HELD_OUT] for x in (query, document)],
        [query[HELD_OUT:], document[HELD_OUT:]],
    )
    params = {k: gt.asarray(x) for k, x in initial().items()}
    print(f"  {len(batch[0])} functions, {HELD_OUT} held out, {STEPS} steps")

    few = [gt.asarray(gt.to_numpy(x[:200]).astype(np.float64)) for x in batch]
    exact = {k: gt.asarray(gt.to_numpy(x).astype(np.float64)) for k, x in params.items()}
    run = gt.compile if backend == "jax" else lambda f: f
    tiled, dense = (run(gt.grad(functools.partial(f, gt)))(exact, *few) for f in (loss, dense_loss))
    apart = max(float(abs(gt.to_numpy(tiled[k] - dense[k])).max()) for k in exact)
    claim(f"the gradient differs from the dense program's by {apart:.1e}", apart < 1e-12)

    step = run(gt.value_and_grad(functools.partial(loss, gt)))
    some = [x[:MEASURED] for x in batch]
    taken, plain = (
        gt.measure(gt.grad(functools.partial(f, gt)), params, *some).peak_bytes / 1e6
        for f in (loss, dense_loss)
    )
    claim(f"{MEASURED} pairs need {taken:.0f} MB in tiles, {plain:.0f} MB dense", taken < plain)
    print(f"  {PAIRS} pairs dense would need {4 * 4 * PAIRS**2 / 1e6:.0f} MB for the logits alone")

    before = recall(gt, params, held_out)
    moments = {k: [0.0, 0.0] for k in params}
    for t in range(STEPS):
        value, grads = step(params, *batch)
        params = {k: adam(gt, x, grads[k], moments[k], t + 1) for k, x in params.items()}
    after = recall(gt, params, held_out)
    claim(f"loss {float(value):.3f}, recall@10 from {before:.1%} to {after:.1%}", after > before)
    return tiled


def encode(gt, w, u, x):
    z = gt.xp.tanh(x @ w) @ u
    return z / gt.xp.sqrt(gt.xp.sum(z * z, axis=1) + 1e-6)[:, None]


def towers(gt, params, query, document, wrap):
    f = wrap(functools.partial(encode, gt))
    return [
        f(params[f"{side}_in"], params[f"{side}_out"], x)
        for side, x in (("query", query), ("document", document))
    ]


def loss(gt, params, query, document):
    wrap = lambda f: gt.chunked(f, CHUNK, in_axes=(None, None, 0))
    x, y = towers(gt, params, query, document, wrap)
    return gt.contrastive_loss(x, y, gt.xp.exp(params["log_scale"]), tile_size=TILE)


def dense_loss(gt, params, query, document):
    x, y = towers(gt, params, query, document, lambda f: f)
    xp, s = gt.xp, gt.xp.exp(params["log_scale"]) * (x @ y.T)
    own = gt.xp.exp(params["log_scale"]) * xp.mean(xp.sum(x * y, axis=1))
    others = [xp.mean(xp.log(xp.sum(xp.exp(s - 30), axis=k)) + 30) for k in (0, 1)]
    return sum(others) / 2 - own


def recall(gt, params, held_out):
    """How often a function's own body is among the ten nearest of its head."""
    x, y = (gt.to_numpy(z) for z in towers(gt, params, held_out[0], held_out[1], lambda f: f))
    scores = x @ y.T
    return float(((scores > np.diag(scores)[:, None]).sum(axis=1) < 10).mean())


def adam(gt, x, g, moments, t):
    moments[0] = 0.9 * moments[0] + 0.1 * g
    moments[1] = 0.99 * moments[1] + 0.01 * g * g
    first, second = moments[0] / (1 - 0.9**t), moments[1] / (1 - 0.99**t)
    return x - RATE * first / (gt.xp.sqrt(second) + 1e-8)


def initial():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
    found = {"log_scale": np.float32(2.0)}
    for side in ("query", "document"):
        found |= {f"{side}_in": draw(LETTERS, HIDDEN), f"{side}_out": draw(HIDDEN, WIDTH)}
    return found


# --- the data


@functools.cache
def pairs(count):
    """Heads and bodies of functions, in an order drawn once, as bags of trigrams."""
    texts = sorted(set(functions(3 * count if QUICK else None)))
    order = np.random.default_rng(0).permutation(len(texts))[:count]
    if len(order) < count:
        sys.exit(f"  FAILED: {len(order)} functions were found, {count} are needed")
    return [np.stack([bag(texts[i][side]) for i in order]) for side in (0, 1)]


def functions(count):
    """(head, body) of the functions in the sources at hand; all, or the first so many."""
    found = []
    folders = [Path(sysconfig.get_path("stdlib")), Path(np.__file__).parent]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        if count is not None and len(found) >= count:
            break
        if (
            folders[0] in path.parents
            and "site-packages" in path.parts
            and folders[1] not in path.parents
        ):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                names = " ".join(a.arg for a in node.args.args)
                body = "\n".join(lines[node.body[0].lineno - 1 : node.end_lineno])
                found.append((f"{node.name} {names}", body[:600]))
    return found


def bag(text):
    found = np.zeros(LETTERS, np.float32)
    text = f" {text.lower()} "
    for i in range(len(text) - 2):
        found[zlib.crc32(text[i : i + 3].encode()) % LETTERS] += 1
    return found / np.linalg.norm(found)


if __name__ == "__main__":
    if QUICK:
        sys.argv.remove("--quick")
    main(show, tolerance=1e-9)
