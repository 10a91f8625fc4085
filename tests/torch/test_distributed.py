"""Compares `chunked` and `all_gather` in several processes with results of a single process.

Each group of processes is started only once. Every check runs in all processes of a group, and the
test compares the results. A process that hangs is terminated and fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradtools.torch as gt
from gradtools import GradtoolsError
from tests.support.processes import found_in_processes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

SECONDS = 100  # On a busy machine, four processes need forty seconds to start.
WORLDS = (2, pytest.param(4, marks=pytest.mark.slow))
ROWS = 5  # rows of the batch in each process
CHECKS: dict[str, Callable[[int, int], Any]] = {}


def check(f):
    CHECKS[f.__name__] = f
    return f


# --- in each process ----------------------------------------------------------------------


def batch(world):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(world * ROWS, 3, generator=generator, dtype=torch.float64)


def encoder(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 2)).double()


def contrast(mine, everything, first=0):
    """Return the mean, over the rows of this process, of a loss that couples all rows."""
    labels = torch.arange(first, first + len(mine))
    return torch.nn.functional.cross_entropy(mine @ everything.sin().T, labels)


class Step(nn.Module):
    """A module for DistributedDataParallel that contains a model and computes its loss."""

    def __init__(self, encoder, encode, loss):
        super().__init__()
        self.encoder, self.encode, self.loss = encoder, encode, loss

    def forward(self, x):
        return self.loss(self.encode(self.encoder, x))


def counted(model, **options):
    """Return the model in DistributedDataParallel, and a list that records its reductions."""
    ddp, seen = DistributedDataParallel(model, **options), []

    def hook(state, bucket):
        seen.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0] / dist.get_world_size())

    ddp.register_comm_hook(None, hook)
    return ddp, seen


def grads(model):
    return [p.grad for p in model.parameters()]


def whole_loss(rank, world):
    def loss(y):
        everything = gt.all_gather(y)
        return contrast(everything, everything)

    return loss


def loss_of_own_rows(rank, world):
    return lambda y: contrast(y, gt.all_gather(y), rank * len(y))


def one_process(world):
    model = encoder()
    y = model(batch(world))
    contrast(y, y).backward()
    return grads(model)


def through_ddp(rank, world, loss, **options):
    """Run DDP with a chunk size that depends on the rank, so that the numbers of chunks differ."""
    encode = lambda f, x: gt.chunked(f, 1 + rank, **options)(x)
    model, seen = counted(Step(encoder(), encode, loss(rank, world)))
    model(batch(world)[rank * ROWS : (rank + 1) * ROWS]).backward()
    return grads(model), one_process(world), len(seen)


@check
def whole(rank, world):
    return through_ddp(rank, world, whole_loss)


@check
def own(rank, world):
    return through_ddp(rank, world, loss_of_own_rows)


@check
def usual_gather(rank, world):
    """Compute gradients with the usual method, in which rows of other processes are constants."""
    model = encoder()
    y = model(batch(world)[rank * ROWS : (rank + 1) * ROWS])
    parts = [torch.empty_like(y) for _ in range(world)]
    dist.all_gather(parts, y.detach())
    parts[rank] = y
    everything = torch.cat(parts)
    contrast(everything, everything).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    return grads(model), one_process(world)


@check
def looped(rank, world):
    """Return gradients and numbers of reductions of DDP with a plain loop and with `chunked`."""
    found = []
    x = batch(world)[rank * ROWS : rank * ROWS + 4]
    for encode in (
        lambda f, x: torch.cat([f(c) for c in x.split(2)]),
        lambda f, x: gt.chunked(f, 2)(x),
    ):
        model = encoder(nn.Dropout(0.5), nn.BatchNorm1d(4))
        torch.manual_seed(rank)
        step = Step(model, encode, loss_of_own_rows(rank, world))
        options = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
        step.unused = nn.Linear(2, 2).double()
        ddp, seen = counted(step, **options)
        with ddp.no_sync():
            ddp(x).backward()
        before = len(seen)
        ddp(x).backward()
        state = [v.double() for v in model.state_dict().values()]
        found.append(
            [[*grads(model), *state, torch.get_rng_state().double()], (before, len(seen) - before)]
        )
    return found


@check
def orders_of_gather(rank, world):
    """Compute two derivatives of a loss that couples all processes, and a tangent of all_gather."""
    x = batch(world)
    mine = x[rank * ROWS : (rank + 1) * ROWS].clone().requires_grad_()
    loss = lambda y: torch.logsumexp(y @ y.T, 1).sum()
    (first,) = torch.autograd.grad(loss(gt.all_gather(mine)), mine, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(3).sum(), mine)
    full = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(loss(full) * world, full, create_graph=True)
    (twice,) = torch.autograd.grad(once.pow(3).sum(), full)
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(mine.detach(), mine.detach().sin())
        tangent = forward_ad.unpack_dual(gt.all_gather(dual)).tangent
    found = [first.detach(), second, tangent.detach()]
    return found, [once[rows].detach(), twice[rows], x.sin()]


@check
def transforms_of_gather(rank, world):
    """Apply transforms of PyTorch and operators of gradtools to functions that call all_gather."""
    x = batch(world)
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    mine = x[rows]
    cubes = lambda y: gt.all_gather(y) ** 3
    total = lambda y: cubes(y).sum()
    both = torch.stack([mine, 2 * mine])
    twice = torch.stack([x, 2 * x])
    slope = 3 * world * mine**2
    found = [
        torch.func.grad(total)(mine),
        torch.func.grad(lambda y: (torch.func.grad(total)(y) ** 2).sum())(mine),
        torch.func.jvp(cubes, (mine,), (mine.sin(),))[1],
        torch.vmap(cubes, -1)(both.movedim(0, -1)),
        torch.vmap(torch.func.grad(total))(both),
        gt.jacobian(cubes, mode="reverse")(mine).sum((0, 1)),
        gt.jacobian(cubes, mode="forward")(mine).sum((2, 3)),
        gt.hvp(total, (mine,), (mine.sin(),))[1][0],
    ]
    return found, [
        slope,
        # Each process computes the sum of squared gradients, so the derivative is summed over
        # processes.
        world * 6 * mine * 2 * slope,
        3 * x**2 * x.sin(),
        twice**3,
        3 * world * both**2,
        slope,
        3 * x**2,
        6 * world * mine * mine.sin(),
    ]


@check
def trees_and_groups(rank, world):
    mine = {"a": torch.full((2, 1), float(rank)), "b": [torch.arange(3) + 10 * rank]}
    everything = gt.all_gather(mine)
    half = [dist.new_group(list(range(k, k + world // 2))) for k in (0, world // 2)]
    group = half[rank // (world // 2)]
    part = gt.all_gather(torch.full((1,), rank, dtype=torch.float64), group=group)
    return everything, part


def token_loss(net, x, tokens):
    return (tokens * net(x)[:, 0] ** 2).sum() / tokens.sum()


def parts(rank, world):
    """Return 60 examples, their token counts, and the rows of the steps of this rank."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 5, (60,), generator=generator).double()
    # Steps of unequal sizes, and one step without rows.
    cuts = [(0, 7), (7, 8), (8, 8), (8, 41)]
    return x, tokens, {0: cuts, 1: [(41, 60)]}.get(rank, [])


def full_gradient(net, x, tokens):
    return [g.detach() for g in gt.grad(token_loss)(net, x, tokens).values()]


def in_order(grads):
    return [g.detach() for g in grads.values()]


@check
def token_means(rank, world):
    """Average gradients over tokens, from `gt.grad` and from `backward` under DDP's no_sync."""
    from torch.distributed.device_mesh import init_device_mesh

    x, tokens, steps = parts(rank, world)
    net, found = encoder(), []
    acc, synced = gt.GradientAccumulator(), gt.GradientAccumulator()
    ddp = DistributedDataParallel(net)
    for a, b in steps:
        count = tokens[a:b].sum()
        acc.add(gt.grad(token_loss)(net, x[a:b], tokens[a:b]), count)
        with ddp.no_sync():
            token_loss(ddp, x[a:b], tokens[a:b]).backward()
        synced.add({name: p.grad for name, p in net.named_parameters()}, count)
        net.zero_grad()
    if not steps:
        for each in (acc, synced):
            each.add({name: torch.zeros_like(p) for name, p in net.named_parameters()}, 0)
    mesh = init_device_mesh("cpu", (1, world))
    found += [in_order(acc.mean(group=group)) for group in (dist.group.WORLD, mesh)]
    return [*found, in_order(synced.mean(group=mesh))], full_gradient(net, x, tokens), acc.weight


@check
def token_means_of_fsdp(rank, world):
    """Average gradients over tokens with FSDP, with losses divided by the tokens of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, tokens, steps = parts(rank, world)
    expected = full_gradient(encoder(), x, tokens)
    mesh = init_device_mesh("cpu", (world,))
    net, acc = fully_shard(encoder(), mesh=mesh), gt.GradientAccumulator()
    for k in range(4):
        a, b = steps[k] if k < len(steps) else (0, 0)
        count = tokens[a:b].sum()
        dist.all_reduce(count)
        if count == 0:
            continue
        loss = (tokens[a:b] * net(x[a:b])[:, 0] ** 2).sum()
        (loss * world / count).backward()
        acc.add({name: p.grad for name, p in net.named_parameters()}, count)
        net.zero_grad()
    found = [g.full_tensor() for g in acc.mean(group=mesh).values()]
    said = []
    unequal = gt.GradientAccumulator()
    unequal.add(acc.mean(), 1 + rank)
    for call in (lambda: unequal.mean(group=mesh), lambda: gt.grad(token_loss)(net, x, tokens)):
        try:
            call()
        except GradtoolsError as error:
            said.append(str(error))
    return found, expected, said


@check
def refused(rank, world):
    said = []

    def attempt(f):
        try:
            said.append(f())
        except GradtoolsError as error:
            said.append(str(error))

    attempt(lambda: gt.all_gather(torch.ones(1 + rank, 2)))
    attempt(lambda: gt.all_gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32)))
    attempt(lambda: gt.all_gather(torch.ones(())))
    attempt(lambda: gt.all_gather(torch.ones(2), axis_name="i"))
    ddp = DistributedDataParallel(encoder())
    attempt(lambda: gt.chunked(ddp, 2)(batch(world)))
    attempt(lambda: gt.chunked(lambda c: [ddp][0](c), 2)(batch(world)))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    sharded = fully_shard(encoder(), mesh=init_device_mesh("cpu", (world,)))
    attempt(lambda: gt.chunked(sharded, 2)(batch(world)))
    register_fsdp_forward_method(sharded, "forward")
    attempt(lambda: gt.chunked(sharded.forward, 2)(batch(world)))
    return said


def run(rank, world, name):
    return CHECKS[name](rank, world)


# --- in the test process ------------------------------------------------------------------


@pytest.fixture(scope="module", params=WORLDS, ids="{} processes".format)
def processes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return found_in_processes(run, CHECKS, request.param, folder, SECONDS, last=True)


def found_by(processes, name):
    found = [p.get(name, "it hangs") for p in processes]
    for each in found:
        assert not isinstance(each, str), each
    return found


def close(found, expected, tolerance=1e-12):
    assert len(found) == len(expected)
    worst = [
        (a - b).abs().max() / (1 + b.abs().max()) for a, b in zip(found, expected, strict=True)
    ]
    return max(worst) <= tolerance


@pytest.mark.sweep_at("whole", "own")
@pytest.mark.parametrize("name", ["whole", "own"])
def test_the_gradient_of_a_loss_over_the_global_batch(processes, name):
    for found, expected, reductions in found_by(processes, name):
        assert close(found, expected) and reductions == 1
        assert min(g.abs().max() for g in expected) > 1e-4


def test_rows_of_others_as_constants_give_another_gradient(processes):
    for found, expected in found_by(processes, "usual_gather"):
        scale = found[0].norm() / expected[0].norm()
        assert not close(found, expected, 1e-3) and abs(scale - 1) > 0.1


def test_ddp_around_chunked_is_ddp_around_the_plain_loop(processes):
    for (plain, reductions), (ours, our_reductions) in found_by(processes, "looped"):
        assert close(ours, plain) and reductions == our_reductions == (0, 1)


def test_gather_is_differentiated_to_any_order_and_in_forward_mode(processes):
    for found, expected in found_by(processes, "orders_of_gather"):
        assert close(found, expected)


def test_gather_in_transforms(processes):
    for found, expected in found_by(processes, "transforms_of_gather"):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gather_takes_trees_and_groups(processes):
    world = len(processes)
    for rank, (everything, part) in enumerate(found_by(processes, "trees_and_groups")):
        assert everything["a"].flatten().tolist() == [r for r in range(world) for _ in range(2)]
        assert everything["b"][0].tolist() == [10 * r + k for r in range(world) for k in range(3)]
        first = 0 if rank < world // 2 else world // 2
        assert part.tolist() == list(range(first, first + world // 2))


def test_what_is_refused_in_every_process(processes):
    for shapes, dtypes, scalar, axis, ddp, held, *sharded in found_by(processes, "refused"):
        assert "all_gather: the processes pass different shapes" in shapes and "(2, 2)" in shapes
        assert "different shapes or dtypes" in dtypes and "torch.float64" in dtypes
        assert "expected tensors with rows along axis 0" in scalar
        assert "axis_name is an argument for JAX" in axis
        for message in (ddp, held):
            assert "f is or contains a DistributedDataParallel" in message
            assert "Reverse the nesting" in message
            assert "around a module whose forward calls chunked" in message
        for message in sharded:
            assert "f is or contains a FSDPModule" in message
            assert "forward calls chunked on its layers or on one of its methods" in message


def test_token_means_over_ranks_and_steps_are_the_gradient_of_all_examples(processes):
    for found, expected, _ in found_by(processes, "token_means"):
        for each in found:
            assert close(each, expected, 1e-14)
    weights = [weight for *_, weight in found_by(processes, "token_means")]
    assert sum(weights) == parts(0, 2)[1].sum()


def test_token_means_of_fsdp2_and_what_it_refuses(processes):
    for found, expected, (unequal, pure) in found_by(processes, "token_means_of_fsdp"):
        assert close(found, expected, 1e-14)
        assert "a DTensor with the weights [1, 2" in unequal
        assert "grad: the module is a FSDPModule" in pure and "backward()" in pure
