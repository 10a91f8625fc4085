"""Defines healthy losses in both frameworks, for which why_zero must report nothing.

Each loss takes `gt` and a dict of parameters, whose shapes are in the table `HEALTHY`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Program = Callable[..., Any]


def rows(gt, *shape, seed=0):
    return gt.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def mse(gt, a, b):
    return gt.xp.mean((a - b) ** 2)


def softmax(gt, x):
    e = gt.xp.exp(x - gt.stop_gradient(gt.xp.max(x, axis=-1, keepdims=True)))
    return e / gt.xp.sum(e, axis=-1, keepdims=True)


def log_softmax(gt, x):
    return gt.xp.log(softmax(gt, x))


def unit(gt, x):
    return x / gt.xp.sqrt(gt.xp.sum(x**2, axis=-1, keepdims=True))


def sigmoid(gt, x):
    return 1 / (1 + gt.xp.exp(-x))


def floats(gt, x):
    return gt.xp.astype(x, gt.xp.float32)


def one_hot(gt, index, n):
    return floats(gt, index[..., None] == gt.asarray(np.arange(n)))


def nearest(gt, codes, z):
    distances = gt.xp.sum((z[:, None] - codes) ** 2, axis=-1)
    return codes[gt.xp.argmin(distances, axis=1)]


def features(gt, p, seed=0):
    return gt.xp.tanh(rows(gt, 6, 5, seed=seed) @ p["w"])


# --- straight-through estimators ---------------------------------------------------------

# Straight-through formulas whose value is h, a discrete function of p, and whose gradient is the
# gradient of p. S is stop_gradient.
SPELLINGS: dict[str, Program] = {
    "p + S(h - p)": lambda S, h, p: p() + S(h(p()) - p()),
    "h - S(p) + p": lambda S, h, p: h(p()) - S(p()) + p(),
    "h + (p - S(p))": lambda S, h, p: h(p()) + (p() - S(p())),
    "S(h) + p - S(p)": lambda S, h, p: S(h(p())) + p() - S(p()),
    "S(h - p) + p": lambda S, h, p: S(h(p()) - p()) + p(),
    "p - S(p - h)": lambda S, h, p: p() - S(p() - h(p())),
    "p + S(h) - S(p)": lambda S, h, p: p() + S(h(p())) - S(p()),
    "h of S(p), with p - S(p)": lambda S, h, p: h(S(p())) + (p() - S(p())),
    "-(S(p - h) - p)": lambda S, h, p: -(S(p() - h(p())) - p()),
    "S(h) + (p - S(p)) / 1": lambda S, h, p: S(h(p())) * 1.0 + (p() - S(p())) / 1.0,
    "h, and 2 p - 2 S(p)": lambda S, h, p: h(p()) + (2 * p() - S(2 * p())) / 2,
    "S(h) + (p - S(p)) of a list": lambda S, h, p: sum([S(h(p())), p(), -S(p())]),
}


def straight_through(spelling: str, is_scalar: bool, is_computed_once: bool) -> Program:
    """Return a loss that rounds with a straight-through estimator."""

    def loss(gt, p):
        def soft():
            x = gt.xp.sum(p["x"]) if is_scalar else p["x"]
            return 3 * gt.xp.tanh(x)

        known = soft()
        here = (lambda: known) if is_computed_once else soft
        y = SPELLINGS[spelling](gt.stop_gradient, gt.xp.round, here)
        return y if is_scalar else gt.xp.sum(y * rows(gt, 4))

    return loss


# --- stop_gradient in algorithms that need it --------------------------------------------


def vq_vae(gt, p):
    x, stop = rows(gt, 6, 5), gt.stop_gradient
    z = x @ p["encoder"]
    q = nearest(gt, p["codes"], z)
    decoded = (z + stop(q - z)) @ p["decoder"]
    return mse(gt, decoded, x) + mse(gt, q, stop(z)) + 0.25 * mse(gt, z, stop(q))


def vq_vae_by_straight_through(gt, p):
    x, stop = rows(gt, 6, 5), gt.stop_gradient
    z = x @ p["encoder"]
    q = nearest(gt, p["codes"], z)
    code = stop(q)
    passed = gt.straight_through(lambda z: code)(z)
    return mse(gt, passed @ p["decoder"], x) + mse(gt, q, stop(z)) + 0.25 * mse(gt, z, code)


def vq_vae_with_ema(gt, p):
    """Return the loss of a VQ-VAE with a moving-average codebook, and smoothed code counts."""
    x, codes, stop = rows(gt, 6, 5), rows(gt, 7, 3, seed=4), gt.stop_gradient
    z = x @ p["encoder"]
    q = nearest(gt, codes, z)
    counts = gt.xp.sum(one_hot(gt, gt.xp.argmin(stop(z) @ codes.T, axis=1), 7), axis=0)
    smoothed = 0.99 + 0.01 * counts
    decoded = (z + stop(q - z)) @ p["decoder"]
    return (mse(gt, decoded, x) + 0.25 * mse(gt, z, stop(q))), smoothed


def symmetric_stops(gt, p):
    a, b = p["a"], p["b"]
    return mse(gt, a, gt.stop_gradient(b)) + 0.25 * mse(gt, b, gt.stop_gradient(a))


def barlow_twins(gt, p):
    a, b = (features(gt, p, seed=k) for k in (1, 2))
    a, b = (x - gt.xp.mean(x, axis=0) for x in (a, b))
    c = a.T @ b / 6
    eye = gt.asarray(np.eye(4, dtype=np.float32))
    return gt.xp.sum(((c - eye) ** 2) * (eye + 0.01 * (1 - eye)))


def contrastive(gt, p):
    a, b = (unit(gt, features(gt, p, seed=k)) for k in (1, 2))
    scores = a @ b.T / 0.1
    eye = gt.asarray(np.eye(6, dtype=np.float32))
    return -gt.xp.mean(gt.xp.sum(log_softmax(gt, scores) * eye, axis=-1))


def q_learning(gt, p):
    s, t = rows(gt, 6, 4), rows(gt, 6, 4, seed=1)
    target = 1 + 0.9 * gt.stop_gradient(gt.xp.max(t @ p["w"], axis=1))
    error = (s @ p["w"])[:, 0] - target
    return gt.xp.mean(gt.xp.where(abs(error) < 1, 0.5 * error**2, abs(error) - 0.5))


def advantage_actor_critic(gt, p):
    h = gt.xp.tanh(rows(gt, 6, 4) @ p["body"])
    log_p = log_softmax(gt, h @ p["policy"])[:, 0]
    advantage = rows(gt, 6, seed=2) - (h @ p["value"])[:, 0]
    return -gt.xp.mean(log_p * gt.stop_gradient(advantage)) + 0.5 * gt.xp.mean(advantage**2)


def clipped_policy(gt, p):
    log_p = log_softmax(gt, rows(gt, 6, 4) @ p["policy"])[:, 0]
    ratio = gt.xp.exp(log_p - gt.stop_gradient(log_p))
    return -gt.xp.mean(gt.xp.minimum(2 * ratio, 2 * gt.xp.clip(ratio, 0.8, 1.2)))


def soft_actor_critic(gt, p):
    log_p = -gt.xp.sum(gt.xp.tanh(rows(gt, 6, 4) @ p["policy"]) ** 2, axis=1)
    alpha, stop = gt.xp.exp(p["log_alpha"]), gt.stop_gradient
    return gt.xp.mean(stop(alpha) * log_p) - gt.xp.mean(p["log_alpha"] * stop(log_p + 2))


def dino(gt, p):
    teacher = gt.stop_gradient(softmax(gt, (features(gt, p) - 0.1) / 0.04))
    student = log_softmax(gt, features(gt, p, seed=1) / 0.1)
    return -gt.xp.mean(gt.xp.sum(teacher * student, axis=-1))


def consistency_model(gt, p):
    x = rows(gt, 6, 5)
    f = lambda x, t: (x + t * gt.xp.tanh(x @ p["w"] @ p["head"])) / (1 + t)
    return mse(gt, f(x, 0.5), gt.stop_gradient(f(x, 0.4)))


def gumbel_softmax(gt, p):
    noise = -gt.xp.log(-gt.xp.log(sigmoid(gt, rows(gt, 6, 3, seed=1))))
    y = softmax(gt, rows(gt, 6, 5) @ p["w"] + noise)
    hard = one_hot(gt, gt.xp.argmax(y, axis=-1), 3)
    return gt.xp.sum(((hard - gt.stop_gradient(y) + y) @ rows(gt, 3, 2)) ** 2)


def weights_of_losses(gt, p):
    a, b = gt.xp.sum(p["w"] ** 2), gt.xp.sum(gt.xp.exp(p["w"]))
    share = gt.stop_gradient(a / (a + b))
    return share * a + (1 - share) * b + b / gt.stop_gradient(b)


def uncertainty_weights(gt, p):
    a, b = gt.xp.sum(p["w"] ** 2), gt.xp.sum(gt.xp.exp(p["w"]))
    s = p["s"]
    return gt.xp.exp(-s[0]) * a + s[0] + gt.xp.exp(-s[1]) * b + s[1]


def log_sum_exp(gt, p):
    highest = lambda: gt.stop_gradient(gt.xp.max(p["x"]))
    return gt.xp.log(gt.xp.sum(gt.xp.exp(p["x"] - highest()))) + highest()


def truncated_recurrence(gt, p):
    h, loss = gt.asarray(np.zeros((6, 4), np.float32)), 0.0
    for t in range(4):
        before = h if t % 2 else gt.stop_gradient(h)
        h = gt.xp.tanh(rows(gt, 6, 3, seed=t) @ p["w"] + before @ p["u"])
        loss = loss + gt.xp.mean(h**2)
    return loss


def spiking(gt, p):
    """Return the loss of a spiking neuron with a surrogate gradient and detached resets."""
    spike = gt.straight_through(lambda v: v > 0, lambda v: sigmoid(gt, 4 * v))
    v, total = gt.asarray(np.zeros((6, 4), np.float32)), 0.0
    for t in range(3):
        v = 0.9 * v + rows(gt, 6, 5, seed=t) @ p["w"]
        s = spike(v - 0.5)
        v = v - gt.stop_gradient(s) * 0.5
        total = total + s
    return gt.xp.mean((total @ p["head"]) ** 2)


def linear_probe(gt, p):
    x = rows(gt, 6, 5)
    h = gt.xp.tanh(x @ p["encoder"])
    probe = -gt.xp.mean(log_softmax(gt, gt.stop_gradient(h) @ p["probe"])[:, 0])
    return mse(gt, h @ p["decoder"], x) + probe


def sticking_the_landing(gt, p):
    mean, scale = p["mean"], gt.xp.exp(p["log_scale"])
    z = mean + scale * rows(gt, 4, seed=3)
    mean, scale = gt.stop_gradient(mean), gt.stop_gradient(scale)
    log_q = -0.5 * ((z - mean) / scale) ** 2 - gt.xp.log(scale)
    return gt.xp.sum(log_q + 0.5 * z**2)


def domain_adversarial(gt, p):
    h = features(gt, p)
    domain = gt.reverse_gradient(h, scale=0.3) @ p["head"]
    return gt.xp.mean(h**2) + gt.xp.mean(gt.xp.log(1 + gt.xp.exp(domain)))


# --- masks, choices and normalizing constants --------------------------------------------


def batch_normalized(gt, p):
    h = rows(gt, 6, 5) @ p["w"]
    mean, var = gt.xp.mean(h, axis=0), gt.xp.var(h, axis=0)
    return gt.xp.mean(gt.xp.tanh((h - mean) / gt.xp.sqrt(var + 1e-5)) * rows(gt, 6, 4, seed=1))


def normalized_by_stopped_statistics(gt, p):
    h, stop = rows(gt, 6, 5) @ p["w"], gt.stop_gradient
    scaled = (h - stop(gt.xp.mean(h))) / stop(gt.xp.sqrt(gt.xp.var(h) + 1e-5))
    return gt.xp.mean(scaled**2 * rows(gt, 6, 4, seed=1))


def weight_normalized(gt, p):
    v = p["w"] / gt.xp.sqrt(gt.xp.sum(p["w"] ** 2, axis=0))
    return gt.xp.mean(gt.xp.tanh(rows(gt, 6, 5) @ v * p["g"]) ** 2)


def spectrally_normalized(gt, p):
    w, stop = p["w"], gt.stop_gradient
    v = stop(unit(gt, rows(gt, 5)) @ w)
    v = v / stop(gt.xp.sqrt(gt.xp.sum(v**2)))
    u = stop(unit(gt, w @ v))
    return gt.xp.mean((rows(gt, 6, 5) @ (w / (u @ w @ v))) ** 2 * rows(gt, 6, 4, seed=1))


def masked_mean(gt, p):
    loss = (rows(gt, 6, 5) @ p["w"]) ** 2
    mask = floats(gt, rows(gt, 6, 4, seed=2) > 0)
    return gt.xp.sum(loss * mask) / gt.xp.sum(mask)


def top_one_experts(gt, p):
    x = rows(gt, 6, 5)
    gate = softmax(gt, x @ p["gate"])
    chosen = one_hot(gt, gt.xp.argmax(gate, axis=-1), 2)
    outs = gt.xp.stack([gt.xp.tanh(x @ p["a"]), gt.xp.tanh(x @ p["b"])], axis=1)
    out = gt.xp.sum((gate * chosen)[:, :, None] * outs, axis=1)
    balance = 2 * gt.xp.sum(gt.xp.mean(chosen, axis=0) * gt.xp.mean(gate, axis=0))
    return gt.xp.mean(out**2) + 0.01 * balance


def detection_head(gt, p):
    """Return a detection loss with discrete matching of boxes to targets."""
    out = rows(gt, 6, 5) @ p["w"]
    targets = rows(gt, 2, 4, seed=1)
    cost = gt.xp.sum(abs(out[:, None] - targets), axis=-1)
    match = one_hot(gt, gt.xp.argmin(cost, axis=0), 6)
    boxes = gt.xp.sum(match * cost.T) / gt.xp.sum(match)
    positive = gt.xp.max(match, axis=0)
    score = sigmoid(gt, rows(gt, 6, 5) @ p["score"])
    classes = positive * gt.xp.log(score) + (1 - positive) * gt.xp.log(1 - score)
    return boxes - gt.xp.mean(classes)


def intersection_over_union(gt, p):
    low, high = p["low"], p["low"] + gt.xp.exp(p["size"])
    one = gt.asarray(np.float32([1.0, 1.0]))
    inner = gt.xp.clip(gt.xp.minimum(high, one) - gt.xp.maximum(low, 0 * one), 0.0, 9.0)
    inner = inner[0] * inner[1]
    own = gt.xp.exp(p["size"][0] + p["size"][1])
    return 1 - inner / (own + 1 - inner) + 0.1 * gt.xp.sum((low - 0.3) ** 2)


def mixup(gt, p):
    share = 0.3
    x = share * rows(gt, 6, 5) + (1 - share) * rows(gt, 6, 5, seed=1)
    log_p = log_softmax(gt, x @ p["w"])
    return -(share * gt.xp.mean(log_p[:, 0]) + (1 - share) * gt.xp.mean(log_p[:, 1]))


def low_rank_adapter(gt, p):
    frozen = rows(gt, 5, 4, seed=9)
    return mse(gt, rows(gt, 6, 5) @ (frozen + p["a"] @ p["b"]), rows(gt, 6, 4, seed=1))


def metrics_beside(gt, p):
    h = features(gt, p)
    hits = gt.xp.mean(floats(gt, gt.xp.argmax(h, axis=-1) == 0))
    return -gt.xp.mean(log_softmax(gt, h)[:, 0]), {"accuracy": hits, "size": gt.stop_gradient(h)}


def checkpointed(gt, p):
    layer = gt.checkpoint(lambda w, x: gt.xp.tanh(x @ w))
    return gt.xp.mean((layer(p["w"], rows(gt, 6, 5)) @ p["head"]) ** 2)


def in_chunks(gt, p):
    w = p["w"]
    encode = gt.chunked(lambda w, x: gt.xp.tanh(x @ w), 2, in_axes=(None, 0))
    return gt.xp.mean(encode(w, rows(gt, 6, 5)) ** 2)


def quantized_weights(gt, p):
    scale = gt.stop_gradient(gt.xp.max(abs(p["w"]))) / 7
    quantized = gt.xp.round(p["w"] / scale) * scale
    w = p["w"] + gt.stop_gradient(quantized - p["w"])
    return gt.xp.mean((rows(gt, 6, 5) @ w) ** 2)


W = {"w": (5, 4)}
HEAD = {"w": (5, 4), "head": (4, 5)}
HEALTHY: dict[Program, dict[str, tuple[int, ...]]] = {
    vq_vae: {"encoder": (5, 3), "codes": (7, 3), "decoder": (3, 5)},
    vq_vae_by_straight_through: {"encoder": (5, 3), "codes": (7, 3), "decoder": (3, 5)},
    vq_vae_with_ema: {"encoder": (5, 3), "decoder": (3, 5)},
    symmetric_stops: {"a": (6, 3), "b": (6, 3)},
    barlow_twins: W,
    contrastive: W,
    q_learning: {"w": (4, 2)},
    advantage_actor_critic: {"body": (4, 8), "policy": (8, 2), "value": (8, 1)},
    clipped_policy: {"policy": (4, 2)},
    soft_actor_critic: {"policy": (4, 1), "log_alpha": ()},
    dino: W,
    consistency_model: HEAD,
    gumbel_softmax: {"w": (5, 3)},
    weights_of_losses: {"w": (5,)},
    uncertainty_weights: {"w": (5,), "s": (2,)},
    log_sum_exp: {"x": (5,)},
    truncated_recurrence: {"w": (3, 4), "u": (4, 4)},
    spiking: HEAD,
    linear_probe: {"encoder": (5, 3), "decoder": (3, 5), "probe": (3, 2)},
    sticking_the_landing: {"mean": (4,), "log_scale": (4,)},
    domain_adversarial: HEAD,
    batch_normalized: W,
    normalized_by_stopped_statistics: W,
    weight_normalized: {"w": (5, 4), "g": (4,)},
    spectrally_normalized: W,
    masked_mean: W,
    top_one_experts: {"gate": (5, 2), "a": (5, 3), "b": (5, 3)},
    detection_head: {"w": (5, 4), "score": (5,)},
    intersection_over_union: {"low": (2,), "size": (2,)},
    mixup: W,
    low_rank_adapter: {"a": (5, 2), "b": (2, 4)},
    metrics_beside: W,
    checkpointed: HEAD,
    in_chunks: W,
    quantized_weights: W,
}


def parameters(gt, shapes):
    return {name: rows(gt, *shape, seed=7 + k) for k, (name, shape) in enumerate(shapes.items())}
