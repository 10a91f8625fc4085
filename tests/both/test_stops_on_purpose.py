"""why_zero ignores a stop_gradient that an algorithm needs, and reports other lost gradients."""

from __future__ import annotations

import copy

import pytest

from tests.support.healthy_programs import mse, nearest, parameters, rows, symmetric_stops


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_of_two_arguments_that_stop_each_other_none_is_lost(gt, argnums):
    vq = lambda codes, z: (
        mse(gt, nearest(gt, codes, z), gt.stop_gradient(z))
        + 0.25 * mse(gt, z, gt.stop_gradient(nearest(gt, codes, z)))
    )
    symmetric = lambda a, b: symmetric_stops(gt, {"a": a, "b": b})
    for f, first in ((vq, (4, 3)), (symmetric, (6, 3))):
        report = gt.why_zero(f, rows(gt, *first), rows(gt, 6, 3, seed=1), argnums=argnums)
        assert not report and not report.notes, str(report)


def penalty_of_a_stopped_weight(gt, p):
    return mse(gt, p["a"] @ p["b"], rows(gt, 6, 4)) + 0.1 * gt.xp.sum(gt.stop_gradient(p["a"]) ** 2)


def stopped_auxiliary_loss(gt, p):
    x = rows(gt, 6, 6)
    h = gt.xp.tanh(x @ p["a"])
    return mse(gt, h @ p["b"], rows(gt, 6, 4)) + gt.stop_gradient(mse(gt, h, rows(gt, 6, 3)))


def binarised_behind_a_stop(gt, p):
    solid = gt.xp.astype(gt.stop_gradient(p["a"]) > 0, gt.xp.float32)
    return mse(gt, p["a"] @ p["b"], rows(gt, 6, 4)) + (gt.xp.mean(solid) - 0.6) ** 2


def stopped_behind_a_mask(gt, p):
    is_finite = gt.xp.all(gt.xp.isfinite(p["a"]))
    penalty = gt.xp.where(is_finite, gt.xp.sum(gt.stop_gradient(p["a"]) ** 2), 0.0)
    return mse(gt, p["a"] @ p["b"], rows(gt, 6, 4)) + penalty


@pytest.mark.parametrize(
    "f",
    [
        *(penalty_of_a_stopped_weight, stopped_auxiliary_loss),
        *(binarised_behind_a_stop, stopped_behind_a_mask),
    ],
)
def test_a_summand_that_is_stopped_as_a_whole_is_a_note(gt, f):
    report = gt.why_zero(lambda p: f(gt, p), parameters(gt, {"a": (6, 3), "b": (3, 4)}))
    ((text, names),) = report.notes
    assert not report and names == ("argument 0['a']",)
    assert "stops the gradient of a whole summand of the loss" in text


# --- extra networks besides the trained one -----------------------------------------------


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
    # No argument contains the first network, and no optimizer updates it.
    assert not gt.why_zero(loss, optimizer=only_second)


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
    assert not report.notes
