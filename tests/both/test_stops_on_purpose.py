"""A stop that an algorithm needs is no finding of why_zero; one that loses a whole term is."""

from __future__ import annotations

import copy

import numpy as np
import pytest


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


def squared_distances(gt, z, codes):
    return gt.xp.sum((z[:, None] - codes) ** 2, axis=-1)


def one_hot(gt, index, n):
    return gt.xp.astype(index[:, None] == gt.asarray(np.arange(n)), gt.xp.float32)


def nearest(gt, codes, z):
    return codes[gt.xp.argmin(squared_distances(gt, z, codes), axis=1)]


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


def symmetric_stops(gt, p):
    a, b = p["a"], p["b"]
    return mse(gt, a, gt.stop_gradient(b)) + 0.25 * mse(gt, b, gt.stop_gradient(a))


def simsiam(gt, p):
    z1, z2 = (gt.xp.tanh(rows(gt, 6, 5, seed=k) @ p["w"]) for k in (1, 2))
    d = lambda h, z: -gt.xp.mean(unit(gt, h @ p["head"]) * unit(gt, gt.stop_gradient(z)))
    return d(z1, z2) / 2 + d(z2, z1) / 2


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


def self_distillation(gt, p):
    t = gt.stop_gradient(softmax(gt, rows(gt, 6, 5) @ p["w"]))
    s = log_softmax(gt, rows(gt, 6, 5, seed=1) @ p["w"])
    return gt.xp.mean(gt.xp.sum(t * (gt.xp.log(t) - s), axis=-1))


def straight_through_by_hand(gt, p):
    h = rows(gt, 6, 5) @ p["w"]
    return gt.xp.sum((h + gt.stop_gradient(gt.xp.round(h) - h)) ** 2)


def hard_gumbel_softmax(gt, p):
    y = softmax(gt, rows(gt, 6, 5) @ p["w"])
    hard = one_hot(gt, gt.xp.argmax(y, axis=-1), 3)
    return gt.xp.sum(((hard - gt.stop_gradient(y) + y) @ rows(gt, 3, 2)) ** 2)


def weights_of_losses(gt, p):
    a, b = gt.xp.sum(p["w"] ** 2), gt.xp.sum(gt.xp.exp(p["w"]))
    share = gt.stop_gradient(a / (a + b))
    return share * a + (1 - share) * b + b / gt.stop_gradient(b)


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


HEALTHY = {
    vq_vae: {"encoder": (5, 3), "codes": (7, 3), "decoder": (3, 5)},
    vq_vae_by_straight_through: {"encoder": (5, 3), "codes": (7, 3), "decoder": (3, 5)},
    symmetric_stops: {"a": (6, 3), "b": (6, 3)},
    simsiam: {"w": (5, 4), "head": (4, 4)},
    q_learning: {"w": (4, 2)},
    advantage_actor_critic: {"body": (4, 8), "policy": (8, 2), "value": (8, 1)},
    clipped_policy: {"policy": (4, 2)},
    soft_actor_critic: {"policy": (4, 1), "log_alpha": ()},
    self_distillation: {"w": (5, 4)},
    straight_through_by_hand: {"w": (5, 3)},
    hard_gumbel_softmax: {"w": (5, 3)},
    weights_of_losses: {"w": (5,)},
    log_sum_exp: {"x": (5,)},
    truncated_recurrence: {"w": (3, 4), "u": (4, 4)},
    linear_probe: {"encoder": (5, 3), "decoder": (3, 5), "probe": (3, 2)},
    sticking_the_landing: {"mean": (4,), "log_scale": (4,)},
}


def parameters(gt, shapes):
    return {name: rows(gt, *shape, seed=7 + k) for k, (name, shape) in enumerate(shapes.items())}


@pytest.mark.sampled(torch=(20, 34), jax=(14, 34))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("f", HEALTHY, ids=lambda f: f.__name__)
def test_a_stop_that_the_algorithm_needs_is_no_finding(gt, f, compiled):
    loss = lambda p: f(gt, p)
    report = gt.why_zero(gt.compile(loss) if compiled else loss, parameters(gt, HEALTHY[f]))
    assert not report, str(report)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_of_two_arguments_that_stop_each_other_none_is_lost(gt, argnums):
    vq = lambda codes, z: (
        mse(gt, nearest(gt, codes, z), gt.stop_gradient(z))
        + 0.25 * mse(gt, z, gt.stop_gradient(nearest(gt, codes, z)))
    )
    symmetric = lambda a, b: symmetric_stops(gt, {"a": a, "b": b})
    for f, first in ((vq, (4, 3)), (symmetric, (6, 3))):
        report = gt.why_zero(f, rows(gt, *first), rows(gt, 6, 3, seed=1), argnums=argnums)
        assert not report, str(report)
        assert all("stops a term in which others are trained" in text for text, _ in report.notes)
        assert report.notes


def vq_vae_without_straight_through(gt, p):
    x, stop = rows(gt, 6, 5), gt.stop_gradient
    z = x @ p["encoder"]
    q = nearest(gt, p["codes"], z)
    decoded = q @ p["decoder"]
    return mse(gt, decoded, x) + mse(gt, q, stop(z)) + 0.25 * mse(gt, z, stop(q))


def penalty_of_a_stopped_weight(gt, p):
    return mse(gt, p["a"] @ p["b"], rows(gt, 6, 4)) + 0.1 * gt.xp.sum(gt.stop_gradient(p["a"]) ** 2)


def stopped_auxiliary_loss(gt, p):
    x = rows(gt, 6, 6)
    h = gt.xp.tanh(x @ p["a"])
    return mse(gt, h @ p["b"], rows(gt, 6, 4)) + gt.stop_gradient(mse(gt, h, rows(gt, 6, 3)))


def binarised_behind_a_stop(gt, p):
    solid = gt.xp.astype(gt.stop_gradient(p["a"]) > 0, gt.xp.float32)
    return mse(gt, p["a"] @ p["b"], rows(gt, 6, 4)) + (gt.xp.mean(solid) - 0.6) ** 2


LOST = {
    vq_vae_without_straight_through: (
        {"encoder": (5, 3), "codes": (7, 3), "decoder": (3, 5)},
        {
            "encoder": "discrete",
        },
    ),
    penalty_of_a_stopped_weight: ({"a": (6, 3), "b": (3, 4)}, {"a": "detached"}),
    stopped_auxiliary_loss: ({"a": (6, 3), "b": (3, 4)}, {"a": "detached"}),
    binarised_behind_a_stop: ({"a": (6, 3), "b": (3, 4)}, {"a": "detached"}),
}


@pytest.mark.parametrize("f", LOST, ids=lambda f: f.__name__)
def test_a_term_that_trains_nothing_is_still_told(gt, f):
    shapes, expected = LOST[f]
    report = gt.why_zero(lambda p: f(gt, p), parameters(gt, shapes))
    found = {finding.argument: finding.kind for finding in report if not finding.whole}
    assert found == {f"argument 0['{name}']": kind for name, kind in expected.items()}


# --- networks beside the one that is trained ----------------------------------------------


def networks(torch):
    torch.manual_seed(0)
    layer = torch.nn.Linear
    online = torch.nn.Sequential(layer(5, 8), torch.nn.Tanh(), layer(8, 4))
    return online, copy.deepcopy(online), layer(4, 4)


@pytest.mark.torch
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_target_network_in_pytorch_is_a_note(is_named, has_optimizer):
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    online, target, head = networks(torch)
    x = torch.randn(6, 5)

    def loss():
        with torch.no_grad():
            goal = target(x)
        return (head(online(x)) - goal).square().mean()

    trained = [*online.parameters(), *head.parameters()]
    report = gt.why_zero(
        loss,
        model={"online": online, "target": target, "head": head} if is_named else None,
        optimizer=torch.optim.SGD(trained, 0.1) if has_optimizer else None,
    )
    assert not report, str(report)
    ((text, names),) = report.notes
    assert "target network" in text and set(names) == {
        f"target.{name}" for name, _ in target.named_parameters()
    }
    assert "target.0.weight" not in report.arguments


@pytest.mark.torch
def test_a_layer_under_no_grad_is_no_target_network():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    x = torch.randn(6, 4)

    def loss():
        with torch.no_grad():
            h = first(x)
        return second(h).square().mean()

    report = gt.why_zero(loss)
    assert {f.argument: f.kind for f in report} == {
        "first.weight": "no_grad",
        "first.bias": "no_grad",
    }
    only_second = torch.optim.SGD(second.parameters(), 0.1)
    assert not gt.why_zero(loss, optimizer=only_second)  # nobody named it, nobody steps it


@pytest.mark.torch
def test_a_generator_in_the_step_of_its_discriminator_is_a_note():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    generator, critic = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    noise, real = torch.randn(6, 2), torch.randn(6, 3)
    soft = torch.nn.functional.softplus
    loss = lambda: soft(critic(generator(noise).detach())).mean() + soft(-critic(real)).mean()
    report = gt.why_zero(loss, optimizer=torch.optim.SGD(critic.parameters(), 0.1))
    assert not report and report.notes


@pytest.mark.jax
def test_a_target_network_in_jax_is_a_note():
    nnx = pytest.importorskip("flax.nnx")
    import gradtools.jax as gt

    class Net(nnx.Module):
        def __init__(self, seed):
            self.a = nnx.Linear(5, 8, rngs=nnx.Rngs(seed))
            self.b = nnx.Linear(8, 4, rngs=nnx.Rngs(seed))

        def __call__(self, x):
            return self.b(gt.xp.tanh(self.a(x)))

    online, target, x = Net(0), Net(1), rows(gt, 6, 5)
    loss = lambda: gt.xp.mean((online(x) - gt.stop_gradient(target(x))) ** 2)
    report = gt.why_zero(loss, model={"online": online, "target": target})
    assert not report, str(report)
    ((text, names),) = report.notes
    assert "target network" in text and len(names) == 4


DOMAIN_HEADS = {
    "stopped before": (lambda gt, h: gt.reverse_gradient(gt.stop_gradient(h)), True),
    "stopped after": (lambda gt, h: gt.stop_gradient(gt.reverse_gradient(h)), True),
    "scaled": (lambda gt, h: gt.scale_gradient(gt.stop_gradient(2 * h), 0.1), True),
    "right": (lambda gt, h: gt.reverse_gradient(h), False),
    "a probe": (lambda gt, h: gt.stop_gradient(h), False),
}


@pytest.mark.parametrize("name", DOMAIN_HEADS)
def test_a_reversed_gradient_that_reaches_nothing_is_a_finding(gt, name):
    cut, lost = DOMAIN_HEADS[name]
    x = rows(gt, 6, 5)

    def loss(p):
        h = gt.xp.tanh(x @ p["body"])
        return gt.xp.sum((h @ p["label"]) ** 2) + gt.xp.sum(gt.xp.exp(cut(gt, h) @ p["domain"]))

    shapes = {"body": (5, 3), "label": (3, 2), "domain": (3,)}
    report = gt.why_zero(loss, {k: rows(gt, *s) for k, s in shapes.items()})
    found = [(f.kind, f.argument, f.whole) for f in report.findings]
    assert found == ([("detached", "argument 0['body']", False)] if lost else [])
    assert bool(report.notes) == (name == "a probe")


def test_a_probe_that_reverses_what_is_its_own_is_a_note(gt):
    x = rows(gt, 6, 5)

    def loss(p):
        h = gt.xp.tanh(x @ p["body"])
        probe = gt.reverse_gradient(gt.stop_gradient(h) * p["domain"])
        return gt.xp.sum((h @ p["label"]) ** 2) + gt.xp.sum(gt.xp.exp(probe))

    shapes = {"body": (5, 3), "label": (3, 2), "domain": (3,)}
    report = gt.why_zero(loss, {k: rows(gt, *s) for k, s in shapes.items()})
    assert not report and report.notes
