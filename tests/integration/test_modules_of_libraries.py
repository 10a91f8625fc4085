"""Tests modules of opacus and TorchRL, which store their parameters in unusual ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradtools.torch as gt

pytestmark = [pytest.mark.torch, pytest.mark.integration]
ROWS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def assert_is_backward(loss, module, twice=True):
    torch.manual_seed(1)
    value, grads = gt.value_and_grad(loss)(module)
    torch.manual_seed(1)
    wanted = loss(module)
    free = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = torch.autograd.grad(wanted, list(free.values()))
    assert torch.equal(value, wanted) and list(grads) == list(free)
    assert all(torch.equal(g, row) for g, row in zip(grads.values(), rows, strict=True))
    if twice:  # the module supports double backward
        (value + sum(g.square().sum() for g in grads.values())).backward()
    assert not twice or any(p.grad is not None and p.grad.any() for p in free.values())


def test_a_module_of_opacus():
    opacus = pytest.importorskip("opacus")
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    loss = lambda net: net(ROWS).square().mean()
    # The backward hooks of opacus use each activation once, so they do not support double backward.
    assert_is_backward(loss, opacus.GradSampleModule(net), twice=False)


def replay(**more):
    from tensordict import TensorDict

    ones = torch.zeros(6, 1, dtype=torch.bool)
    following = {"observation": ROWS + 1, "reward": ROWS[:, :1], "done": ones, "terminated": ones}
    held = {"observation": ROWS, "action": ROWS[:, :2].tanh() / 2, **more}
    return TensorDict({**held, "next": TensorDict(following, [6])}, [6])


def total(module, batch):
    losses = module(batch.clone())
    return sum(v for k, v in losses.items() if k.startswith("loss") and v.requires_grad)


def test_the_proximal_policy_loss_of_torchrl():
    pytest.importorskip("torchrl")
    from tensordict.nn import TensorDictModule
    from tensordict.nn.distributions import NormalParamExtractor
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.modules.distributions import TanhNormal
    from torchrl.objectives import ClipPPOLoss

    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    named = TensorDictModule(net, ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(named, in_keys=["loc", "scale"], distribution_class=TanhNormal)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    column = ROWS[:, :1]
    known = {"action_log_prob": column[:, 0], "advantage": column, "value_target": column}
    batch = replay(**known, sample_log_prob=column[:, 0])
    assert_is_backward(lambda module: total(module, batch), ClipPPOLoss(actor, critic))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, observation, action):
        return self.layer(torch.cat([observation, action], -1))


def test_the_deterministic_policy_loss_of_torchrl():
    pytest.importorskip("torchrl")
    from torchrl.modules import Actor, ValueOperator
    from torchrl.objectives import DDPGLoss

    critic = ValueOperator(Critic(), in_keys=["observation", "action"])
    module = DDPGLoss(Actor(nn.Linear(3, 2)), critic)
    assert_is_backward(lambda module: total(module, replay()), module)
