"""Defines PyTorch training losses with planted bugs, for tests/torch/test_lost_in_training.py.

Each entry creates a `Loop` with a model, an optimizer and a loss. The expected findings are checked
without gradtools: plain optimizer steps determine which parameters do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.lost_gradients import Planted

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 2, (6,), generator=torch.Generator().manual_seed(1))


@dataclass
class Loop:
    """A model with its optimizer and loss.

    Attributes:
        model: The trained model.
        optimizer: The optimizer of the model.
        closure: The loss as a function without arguments.
        meant: A dict of the arrays that should be trained.
    """

    model: nn.Module
    optimizer: Any
    closure: Callable[[], torch.Tensor]
    meant: dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def loop(model, optimizer=None, forward=None, loss=None, extra=()):
    run = forward or model
    given = loss or (lambda: F.cross_entropy(run(X), Y))
    meant = {**dict(model.named_parameters()), **dict(extra)}
    return Loop(model, optimizer or torch.optim.SGD(model.parameters(), 0.5), given, meant)


LINEAR = ("weight", "bias")
PLANTED: dict[str, Planted] = {}


def planted(found, **more):
    """Register a loop and the expected lost gradients."""

    def register(make):
        PLANTED[make.__name__.replace("_", " ")] = Planted(make, found, **more)
        return make

    return register


def of(kind, *prefixes):
    return {f"{prefix}.{name}": kind for prefix in prefixes for name in LINEAR}


@planted(of("unread", "spare"))
def forgotten_layer():
    model = Net()
    model.spare = nn.Linear(4, 4)
    return loop(model)


@planted(of("detached", "body"))
def detached_features():
    model = Net()
    return loop(model, forward=lambda x: model.head(torch.tanh(model.body(x)).detach()))


@planted(of("left_framework", "body"))
def through_numpy():
    model = Net()
    again = lambda h: torch.from_numpy(h.detach().numpy())
    return loop(model, forward=lambda x: model.head(again(model.body(x))))


@planted(of("discrete", "gate"))
def chosen_by_a_number():
    model, factors = Net(), (1.0, 2.0)
    model.gate = nn.Linear(3, 2)
    return loop(model, forward=lambda x: model(x) * factors[int(model.gate(x).sum(0).argmax())])


@planted(of("discrete", "gate"))
def branched():
    model = Net()
    model.gate = nn.Linear(3, 1)
    return loop(model, forward=lambda x: model(x) * 2 if model.gate(x).sum() > 0 else model(x))


@planted(of("no_grad", "body"))
def reentrant_checkpoint():
    model = Net()
    body = lambda x: checkpoint(model.body, x, use_reentrant=True)
    return loop(model, forward=lambda x: model.head(torch.tanh(body(x))))


@planted(of("rule", "body"))
def layer_in_a_function():
    model = Net()

    class Body(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return model.body(x)

        @staticmethod
        def backward(ctx, ct):
            return ct @ model.body.weight

    return loop(model, forward=lambda x: model.head(torch.tanh(Body.apply(x))))


@planted({"level": "zero_derivative"})
def rounded():
    model = Net()
    model.level = nn.Parameter(torch.ones(3) * 1.2)
    return loop(model, forward=lambda x: model(x * model.level.round()))


@planted({"temperature": "left_framework"})
def temperature_as_number():
    model = Net()
    model.temperature = nn.Parameter(torch.tensor(2.0))
    return loop(model, forward=lambda x: model(x) / model.temperature.item())


@planted(of("not_optimized", "late"))
def layer_added_later():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.late = nn.Linear(3, 3)
    return loop(model, optimizer, forward=lambda x: model(model.late(x)))


@planted(of("not_optimized", "head"), strangers=True)
def head_replaced():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.head = nn.Linear(4, 2)
    return loop(model, optimizer)


@planted(of("not_optimized", "body", "head"), strangers=True)
def optimizer_of_a_copy():
    model = Net()
    return loop(model, torch.optim.Adam(copy.deepcopy(model).parameters(), 0.5))


@planted(of("not_optimized", "body", "head"))
def learning_rate_of_zero():
    model = Net()
    return loop(model, torch.optim.Adam(model.parameters(), 0.0))


@planted(of("not_optimized", "body"))
def learning_rate_of_zero_in_a_group():
    model = Net()
    groups = [{"params": model.body.parameters(), "lr": 0.0}, {"params": model.head.parameters()}]
    return loop(model, torch.optim.SGD(groups, 0.5))


@planted({}, oracle=False)
def warmup_from_zero():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
    return loop(model, optimizer)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = [nn.Linear(3, 3), nn.Linear(3, 3)]
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@planted(of("unregistered", "blocks[0]", "blocks[1]"))
def plain_list():
    model = Listed()
    pairs = [
        (f"blocks[{i}].{k}", getattr(b, k)) for i, b in enumerate(model.blocks) for k in LINEAR
    ]
    return loop(model, extra=pairs)


@planted({"scale": "unregistered"})
def scaled_parameter():
    model = Net()
    # The product is the result of an operation, not a parameter.
    model.scale = nn.Parameter(torch.ones(3)) * 0.1
    return loop(model, forward=lambda x: model(x * model.scale), extra=[("scale", model.scale)])


@planted({"scale": "unregistered"})
def parameter_as_a_buffer():
    model = Net()
    model.register_buffer("scale", nn.Parameter(torch.ones(3)))
    return loop(model, forward=lambda x: model(x * model.scale), extra=[("scale", model.scale)])


@planted({})
def buffer_of_a_scale():
    model = Net()
    model.register_buffer("scale", torch.ones(3))
    return loop(model, forward=lambda x: model(x * model.scale))


@planted(of("frozen", "body"))
def frozen_by_accident():
    model = Net()
    model.body.requires_grad_(False)
    return loop(model)


@planted(of("frozen", "body", "head"), oracle=False)
def all_frozen():
    model = Net().requires_grad_(False)
    return loop(model)


@planted(of("frozen", "body", "head"), oracle=False, strangers=True)
def all_frozen_and_none_in_the_optimizer():
    model = Net().requires_grad_(False)
    return loop(model, torch.optim.SGD(Net().parameters(), 0.5))


@planted({}, notes=("body.weight", "body.bias"), oracle=False)
def frozen_parts_in_no_optimizer():
    model = Net()
    model.body.requires_grad_(False)
    return loop(model, torch.optim.SGD(model.head.parameters(), 0.5))


@planted({**of("zero", "body"), "head.weight": "zero"}, numerical=True)
def dead_relu():
    model = Net()
    with torch.no_grad():
        model.body.bias.fill_(-100.0)
    return loop(model, forward=lambda x: model.head(torch.relu(model.body(x))))


@planted({}, notes=("branch.weight", "branch.bias"), oracle=False)
def zero_gate():
    model = Net()
    model.gate = nn.Parameter(torch.zeros(()))
    model.branch = nn.Linear(3, 2)
    return loop(model, forward=lambda x: model(x) + model.gate * model.branch(x))


@planted(of("detached", "aux"), notes=("body.weight", "body.bias"))
def two_losses_one_detached():
    model = Net()
    model.aux = nn.Linear(4, 2)

    def loss():
        h = torch.tanh(model.body(X))
        return F.cross_entropy(model.head(h), Y) + F.cross_entropy(model.aux(h), Y).detach()

    return loop(model, loss=loss)
