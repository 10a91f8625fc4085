"""Tests ahead-of-time compilation of the JAX backend for TPU and GPU, without a device.

`make tpu` and `make cuda` install the compilers and run these tests, which compile the programs of
benchmarks/ahead_of_time.py and of every_operator.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import gradtools.jax as gt
from benchmarks import ahead_of_time as ahead
from benchmarks.ahead_of_time import CUDA, HAND, OURS, TPU, Target
from tests.support.every_operator import JITTED, POINT, World, healthy

pytestmark = [pytest.mark.ahead, pytest.mark.usefixtures("default_precision")]
INSTALLED = {TPU: "libtpu", CUDA: "jax_cuda12_plugin"}
TARGETS = [
    pytest.param(Target(platform, dtype), id=f"{platform}-{jnp.dtype(dtype).name}")
    for platform in INSTALLED
    for dtype in ahead.DTYPES
]


@pytest.fixture(params=TARGETS)
def target(request) -> Target:
    """Return a `Target`: an accelerator platform and the dtype of arrays."""
    pytest.importorskip(INSTALLED[request.param.platform], reason="make tpu cuda")
    return request.param


@pytest.fixture(params=[p for p in TARGETS if p.values[0].dtype == jnp.float32])
def single(request) -> Target:
    """Return a `Target` with float32 arrays."""
    pytest.importorskip(INSTALLED[request.param.platform], reason="make tpu cuda")
    return request.param


# --- costs -----------------------------------------------------------------------------------

# Operators that cost more or less than handwritten code: clip_gradient avoids overflow in the norm,
# straight_through has one fewer subtraction, chunked stores the index of each chunk, and
# microbatched_value_and_grad weights chunks and adds bfloat16 gradients in float32.
UNEQUAL = ("clip_gradient", "straight_through", "chunked", "microbatched_value_and_grad")


@pytest.mark.parametrize("name", ahead.cases())
def test_an_operator_costs_what_the_lines_by_hand_cost(name, target):
    if name in ahead.NOT_COMPILED[target.platform]:
        pytest.skip("jax#23971: the lowering of a callback requires a device")
    ways = ahead.operator(target, name)
    ours, hand = ways[OURS], ways[HAND]
    if name not in UNEQUAL:
        assert ours == hand
        return
    totals = (
        4 * ahead.WIDTH**2 if name == "microbatched_value_and_grad" else 0
    )  # The sum of gradients is stored in float32.
    assert ours.temporaries <= hand.temporaries + totals + 2**19
    assert ours.flops is None or ours.flops[0] <= 1.01 * hand.flops[0]
    assert ours.peak is None or ours.peak <= 1.01 * hand.peak + totals


def test_a_step_in_chunks_needs_one_chunk_and_what_grows_with_the_batch_itself(target):
    costs = {count: ahead.chunks(target, count) for count in ahead.COUNTS}
    rows = ahead.CHUNK * ahead.FEATURES * jnp.dtype(target.dtype).itemsize
    # gradients of parameters are accumulated in float32
    sums = 4 * ahead.LAYERS * ahead.FEATURES**2
    for count, found in costs.items():
        # the bytes of outputs, cotangents, and, on a TPU, a bfloat16 copy of a float32 batch
        outputs = 3 * count * rows
        alone, ours = found["one chunk alone"], found["chunked"]
        if target.platform == TPU:
            assert ours.temporaries <= 2**20
            assert ours.peak <= 1.1 * (alone.peak + outputs + sums)
        else:
            assert ours.temporaries <= 1.1 * (alone.temporaries + outputs + sums)
    few, many = (costs[n]["at once"].temporaries for n in (8, 32))
    assert many - few > 20 * 24 * rows  # each of the 16 layers saves a residual


def test_a_mixed_partial_needs_the_same_at_any_depth(target):
    costs = [ahead.depth(target, n) for n in ahead.DEPTHS]
    weights = [
        n * ahead.FEATURES**2 * jnp.dtype(target.dtype).itemsize for n in ahead.DEPTHS
    ]  # the compiler may store a second copy of the weights with another dtype or layout
    ours = [c["mixed_partial"].temporaries - 2 * w for c, w in zip(costs, weights, strict=True)]
    assert max(ours) <= max(0, 1.1 * ours[0])
    plain = [c["double backward"] for c in costs]
    assert max(c.peak or c.temporaries for c in plain) > 3 * max(
        c["mixed_partial"].peak or c["mixed_partial"].temporaries for c in costs
    )


def test_frozen_needs_the_same_at_any_depth(target):
    for n in ahead.DEPTHS:
        found = ahead.uses(target, n)
        weights = n * ahead.FEATURES**2 * jnp.dtype(target.dtype).itemsize
        rows = 128 * ahead.FEATURES * jnp.dtype(target.dtype).itemsize
        # The residuals of one call of G, and the gradients and cotangents of all calls, are stored.
        one_graph, slopes = 2 * n * rows, 3 * ahead.USES * rows
        assert found["frozen"].temporaries <= one_graph + slopes + 2 * weights
    assert found["double backward"].temporaries > 8 * found["frozen"].temporaries


def test_a_contrastive_step_needs_no_matrix_of_pairs(target):
    ways = ahead.contrast(target, 16384)
    dense, chunked = ways["encoder chunked"], ways["encoder and loss chunked"]
    assert dense.temporaries > 2**30
    assert chunked.temporaries < 2**28


@pytest.mark.parametrize("board", ahead.BOARDS)
@pytest.mark.parametrize("kind", ahead.KINDS)
def test_devices_gather_features_and_reduce_parameters_once(kind, board, single):
    count = len(ahead.devices(single.platform, board))
    found = ahead.meshes(single, kind, board)
    # The parameter gradients and the loss are reduced; without shard_map, the cotangents of the
    # features are also reduced.
    reductions = {"shard_map": 1, "Explicit": 3, "Auto": 3}[kind]
    assert 0 < found.moves["all-reduce"] <= reductions + (found.moves["reduce-scatter"] == 0)
    features = count * 4 * ahead.CHUNK * ahead.FEATURES * 4
    if kind == "shard_map" and single.platform == CUDA:  # XLA stores one more array of scores
        hand = ahead.meshes(single, kind, board, chunked=ahead.by_hand)
        assert found.temporaries <= 1.001 * hand.temporaries
    else:
        assert found.temporaries < 10 * features + 2**22


# --- the programs of every_operator.py -------------------------------------------------------


@pytest.mark.parametrize("use", JITTED, ids=str)
def test_a_use_compiles_or_says_why_not(use, target):
    x = target.array(*POINT.shape)
    f = use.make(World(gt, healthy(gt), gt.asarray(POINT.astype(target.dtype))))
    lowered = lambda: jax.jit(f).lower(x)
    if use.public == "host_function" and target.platform == CUDA:
        with pytest.raises(RuntimeError, match="Unknown backend: 'gpu'"):  # jax#23971
            lowered()
        return
    assert lowered().compile().memory_analysis() is not None
