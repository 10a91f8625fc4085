"""Leaves that several calls share: one set of sums, and the gradients of the plain step.

The oracle is the plain loop over chunks, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradtools.torch as gt

ROWS, CHUNK, WIDTH = 12, 4, 5


class Net(nn.Module):
    """A shared body, and a head for each tower."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))
        self.double()

    def tower(self, k):
        return lambda x: self.heads[k](self.body(x))


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw) for _ in range(3)]


def plain(f):
    return lambda x: torch.cat([f(part) for part in x.split(CHUNK)])


def loss_of(zs):
    return sum((a @ b.T).logsumexp(1).mean() for a, b in zip(zs, [*zs[1:], zs[0]], strict=True))


def by_backward(loss, net):
    loss.backward()
    return [p.grad for p in net.parameters()]


def of_some(loss, net):
    loss.backward(inputs=[net.body[0].weight, net.heads[1].bias])
    return [p.grad for p in net.parameters()]


def onto_a_gradient(loss, net):
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    return by_backward(loss, net)


def twice(loss, net):
    loss.backward(retain_graph=True)
    return by_backward(loss, net)


def with_a_graph(loss, net):
    return torch.autograd.grad(loss, list(net.parameters()), create_graph=True, allow_unused=True)


def second_order(loss, net):
    grads = [g for g in with_a_graph(loss, net) if g is not None]
    return by_backward(loss + sum(g.square().sum() for g in grads), net)


def batched(loss, net):
    scales = torch.arange(3.0, dtype=torch.float64)
    ps = list(net.parameters())
    return torch.autograd.grad(loss, ps, scales, is_grads_batched=True, allow_unused=True)


def hooked(loss, net):
    seen = []
    weight = net.body[0].weight
    weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    grads = by_backward(loss, net)
    assert len(seen) == 2
    return [*grads, *seen]


WAYS = by_backward, of_some, onto_a_gradient, twice, second_order, batched, hooked


def one_body(net, chunked):
    """Three calls of one function."""
    f = chunked(net.body)
    return loss_of([f(x) for x in batches()])


def two_functions(net, chunked):
    """Calls that share some leaves, and have others each; one is used twice."""
    zs = [chunked(net.tower(k))(x) for k, x in enumerate(batches())]
    return loss_of([*zs, chunked(net.tower(0))(zs[0].exp() @ torch.ones(3, WIDTH).double())])


def one_is_lost(net, chunked):
    """A call that the loss does not reach, and one whose part of the loss is zero."""
    f = chunked(net.body)
    a, b, c = (f(x) for x in batches())
    return loss_of([a, b, torch.where(torch.zeros_like(c) > 0, c, 1.0)]) + f(a).mean()


def one_in_the_other(net, chunked):
    """A call of a function that holds another one, and the other one alone."""
    inner = chunked(net.body)
    outer = chunked(lambda x: net.heads[0](inner(x)))
    return loss_of([outer(batches()[0]), net.heads[0](inner(batches()[1]))])


PROGRAMS = one_body, two_functions, one_is_lost, one_in_the_other


# A nested call that is mapped with the cotangents keeps its graph, which a warning says.
@pytest.mark.filterwarnings("ignore:chunked. f reads a tensor that was computed outside")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_calls_that_share_leaves_have_the_gradients_of_the_plain_step(program, way):
    found, expected = (
        way(program(model, chunked), model)
        for model, chunked in (
            (net(), lambda f: gt.chunked(f, CHUNK)),
            (net(), plain),
        )
    )
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
