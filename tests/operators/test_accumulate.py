"""Tests accumulation of gradients in `GradientAccumulator` and in buffers, in both backends."""

import math
import sys
import threading
from collections import namedtuple

import numpy as np
import pytest

from gradtools import GradtoolsError


@pytest.fixture
def torch_gt():
    pytest.importorskip("torch")
    return pytest.importorskip("gradtools.torch")


@pytest.fixture
def jax_gt():
    pytest.importorskip("jax")
    return pytest.importorskip("gradtools.jax")


def is_torch(gt):
    return gt.__name__ == "gradtools.torch"


def f32(gt, values):
    return gt.asarray(np.asarray(values, np.float32))


def array(gt, values, dtype):
    """Return an array of the named dtype, including bfloat16."""
    x = f32(gt, np.asarray(values).real)
    if np.iscomplexobj(values):
        return gt.asarray(np.asarray(values, dtype))
    if is_torch(gt):
        import torch

        return x.to(getattr(torch, dtype))
    return x.astype(dtype)


def zeros_buffer(gt, values):
    """Return the target of accumulation for `values`: parameters in PyTorch or zeros in JAX."""
    if is_torch(gt):
        return {name: f32(gt, value).requires_grad_() for name, value in values.items()}
    return {name: f32(gt, np.zeros_like(value, np.float32)) for name, value in values.items()}


def held(gt, leaf):
    """Return the accumulated gradient of a leaf as a NumPy array, or None if `.grad` is None."""
    if is_torch(gt):
        return None if leaf.grad is None else gt.to_numpy(leaf.grad)
    return np.asarray(leaf)


def in_threads(work, n=8):
    """Run work(0), ..., work(n - 1) in threads and raise the first error."""
    start, errors = threading.Barrier(n), []

    def run(i):
        start.wait()
        try:
            work(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(old)
    if errors:
        raise errors[0]


def compensation_case():
    """Return float32 numbers whose plain sum is wrong in the fourth digit, and the exact sum."""
    rng = np.random.default_rng(3)
    big = rng.normal(size=200).astype(np.float32) * np.float32(2e4)
    values = np.concatenate([big, rng.normal(size=200).astype(np.float32), -big])
    return values, np.float32(math.fsum(map(float, values)))


# --- GradientAccumulator: sums and means -------------------------------------------------


@pytest.mark.slow_at("jax")
def test_sum_is_the_weighted_sum_and_mean_divides_it_by_the_weights(gt):
    acc = gt.GradientAccumulator()
    acc.add({"w": f32(gt, [3.0, 0.0]), "b": (f32(gt, 1.0),)}, weight=4)
    acc.add({"w": f32(gt, [0.0, 9.0]), "b": (f32(gt, 4.0),)}, weight=2)
    total, mean = acc.sum(), acc.mean()
    np.testing.assert_array_equal(gt.to_numpy(total["w"]), [12.0, 18.0])
    np.testing.assert_array_equal(gt.to_numpy(mean["w"]), [2.0, 3.0])
    assert float(total["b"][0]) == 12.0
    assert float(mean["b"][0]) == 2.0


def test_reset_forgets_numbers_and_structure(gt):
    acc = gt.GradientAccumulator()
    acc.add({"w": f32(gt, [1.0])})
    acc.reset()
    acc.add(f32(gt, [[5.0]]))
    np.testing.assert_array_equal(gt.to_numpy(acc.sum()), [[5.0]])


@pytest.mark.parametrize("compensated", [False, True])
def test_a_step_without_tokens_adds_nothing_though_its_mean_is_0_by_0(gt, compensated):
    acc = gt.GradientAccumulator(compensated=compensated)
    assert acc.weight == 0
    for weight, g in ((0, np.nan), (3, 2.0), (f32(gt, 0.0), np.nan), (1, 4.0)):
        acc.add(f32(gt, [g]), weight)
    assert acc.weight == 4
    assert gt.to_numpy(acc.sum()).tolist() == [10.0]
    assert gt.to_numpy(acc.mean()).tolist() == [2.5]


def partitions():
    """Yield 60 examples with token counts, partitioned over the steps of four ranks."""
    rng = np.random.default_rng(0)
    x, tokens = rng.normal(size=(60, 3)), rng.integers(0, 5, size=60).astype(float)
    for steps in (1, 3):
        part = rng.integers(0, 4 * steps, size=60)
        part[part // steps == 2] += steps  # Rank 2 gets no examples.
        part[part == 0] = 4 * steps - 1  # The first step of rank 0 also gets no examples.
        yield x, tokens * (part == np.arange(4 * steps)[:, None]).reshape(4, steps, 60)


def token_mean(w, x, tokens):
    return (tokens * ((x @ w["a"] + w["b"]) ** 2)).sum() / tokens.sum()


def test_any_partition_over_ranks_and_steps_gives_one_gradient_in_jax(jax_gt):
    import jax

    w = {"a": jax_gt.asarray(np.array([0.5, -1.0, 2.0])), "b": jax_gt.asarray(0.1)}
    for x, parts in partitions():

        def mean(tokens, x=x):
            acc = jax_gt.GradientAccumulator()
            for step in tokens:
                acc.add(jax_gt.grad(token_mean)(w, x, step), step.sum())
            return acc.mean(axis_name="rank")

        full = jax_gt.grad(token_mean)(w, x, parts.sum((0, 1)))
        found = jax.vmap(mean, axis_name="rank")(parts)
        for name, g in full.items():
            np.testing.assert_allclose(found[name], [g] * 4, rtol=1e-12)


def test_gradients_that_shard_map_has_summed_are_not_weighted_again(jax_gt):
    import jax
    from jax.sharding import PartitionSpec as P

    def step(varying, w, x):
        if varying:
            w = jax.lax.pcast(w, "i", to="varying")
        acc = jax_gt.GradientAccumulator()
        acc.add(jax_gt.grad(lambda w: (w * x).mean())(w), x.sum())
        return acc.mean(axis_name="i")

    mesh, x = jax.make_mesh((1,), ("i",)), jax_gt.asarray(np.float32([1.0, 3.0]))
    run = lambda varying, check: jax.shard_map(
        lambda w, x: step(varying, w, x), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check
    )(jax_gt.asarray(np.float32(2.0)), x)
    assert run(True, True) == run(False, False) == 2.0
    with pytest.raises(GradtoolsError, match="does not vary over 'i'"):
        run(False, True)


@pytest.mark.parametrize("compensated", [False, True])
def test_complex_gradients_add_up(gt, compensated):
    acc = gt.GradientAccumulator(compensated=compensated)
    acc.add(array(gt, [1 + 2j, -3j], "complex64"), weight=2)
    acc.add(array(gt, [1 - 1j, 1.0 + 0j], "complex64"))
    np.testing.assert_array_equal(gt.to_numpy(acc.sum()), np.array([3 + 3j, 1 - 6j]))
    assert gt.to_numpy(acc.mean()).dtype == np.complex64


# --- GradientAccumulator: precision ------------------------------------------------------


@pytest.mark.sweep_at("jax")
def test_a_compensated_sum_equals_fsum_where_a_plain_one_is_wrong(gt):
    values, exact = compensation_case()
    plain, compensated = gt.GradientAccumulator(), gt.GradientAccumulator(compensated=True)
    for value in values:
        plain.add(f32(gt, value))
        compensated.add(f32(gt, value))
    assert abs(float(plain.sum()) - exact) > 1e-3
    assert np.float32(float(compensated.sum())) == exact


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("compensated", [False, True])
def test_16_bit_gradients_are_added_in_float32_and_read_in_their_own_dtype(gt, name, compensated):
    one, tenth = array(gt, [1.0], name), array(gt, [0.1], name)
    plain = gt.GradientAccumulator(compensated=compensated)
    wide, narrow = gt.GradientAccumulator(dtype="float32"), gt.GradientAccumulator(dtype=name)
    means = gt.GradientAccumulator(compensated=compensated)
    for _ in range(600):
        plain.add(one)
        wide.add(one)
        narrow.add(one, weight=2)
        means.add(tenth, weight=0.5)
    assert float(plain.sum()[0]) == 600.0
    assert float(wide.sum()[0]) == 600.0
    assert float(narrow.sum()[0]) < 1200.0 or name == "float16"
    assert float(means.mean()[0]) == float(tenth[0])
    assert plain.sum().dtype == plain.mean().dtype == one.dtype
    assert gt.to_numpy(wide.mean()).dtype == np.float32


# --- GradientAccumulator: memory, threads, errors ----------------------------------------


def test_the_accumulator_shares_no_memory_with_the_callers_gradients(gt):
    g = np.array([1.0, 2.0], np.float32)
    mine = gt.asarray(g) if is_torch(gt) else g
    once, twice = gt.GradientAccumulator(), gt.GradientAccumulator()
    for acc in (once, twice, twice):
        acc.add(mine)
    np.testing.assert_array_equal(np.asarray(mine), [1.0, 2.0])
    mine[:] = 100.0
    np.testing.assert_array_equal(gt.to_numpy(once.sum()), [1.0, 2.0])
    if is_torch(gt):
        twice.sum().mul_(7.0)
    np.testing.assert_array_equal(gt.to_numpy(twice.sum()), [2.0, 4.0])


BAD_ADDS = {
    "shape": (
        lambda gt: {"w": [f32(gt, [1.0, 2.0, 3.0])]},
        r"grads\['w'\]\[0\] is float32 of shape \(3,\).*; expected float32 of shape \(2,\)",
    ),
    "new leaf": (
        lambda gt: {"w": [f32(gt, [1.0, 2.0])], "b": f32(gt, 1.0)},
        r"grads\['b'\] is new; got .*, expected .*reset\(\)",
    ),
}


@pytest.mark.parametrize("case", BAD_ADDS)
def test_a_gradient_unlike_the_first_is_refused_and_changes_nothing(gt, case):
    make, text = BAD_ADDS[case]
    acc = gt.GradientAccumulator()
    acc.add({"w": [f32(gt, [1.0, 2.0])]})
    with pytest.raises(GradtoolsError, match="GradientAccumulator.add: " + text):
        acc.add(make(gt), weight=5)
    np.testing.assert_array_equal(gt.to_numpy(acc.sum()["w"][0]), [1.0, 2.0])
    np.testing.assert_array_equal(gt.to_numpy(acc.mean()["w"][0]), [1.0, 2.0])


def test_weights_that_sum_to_zero_have_no_mean(gt):
    acc = gt.GradientAccumulator()
    acc.add(f32(gt, 1.0), weight=1)
    acc.add(f32(gt, 3.0), weight=f32(gt, -1.0))
    with pytest.raises(GradtoolsError, match=r"mean: the weights sum to 0.*sum\(\)"):
        acc.mean()
    assert float(acc.sum()) == -2.0


# --- GradientAccumulator: transformations ------------------------------------------------


def test_no_tracer_leaks_into_an_accumulator(jax_gt):
    import jax

    outside, leaked = jax_gt.GradientAccumulator(), []

    def step(g):
        outside.add(g)
        return g

    def leak(g):
        leaked.append(jax_gt.GradientAccumulator())
        leaked[0].add(g)
        return g

    for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda g: f(g).sum())):
        with pytest.raises(GradtoolsError, match=r"created outside of the transformation"):
            transform(step)(np.ones(2, np.float32))
    jax.jit(leak)(np.ones(2, np.float32))
    with pytest.raises(GradtoolsError, match=r"inside of a transformation that has ended"):
        leaked[0].sum()


def test_no_functorch_tensor_leaks_into_an_accumulator(torch_gt):
    import torch

    acc = torch_gt.GradientAccumulator()
    with pytest.raises(GradtoolsError, match="created outside of the transformation"):
        torch.func.vmap(lambda g: (acc.add(g), g)[1])(torch.ones(2))
    inside = torch.func.grad(lambda x: (x * _added(torch_gt, x.detach())).sum())(torch.ones(2))
    np.testing.assert_array_equal(inside.numpy(), [2.0, 2.0])


def _added(gt, x):
    acc = gt.GradientAccumulator()
    acc.add(x)
    acc.add(x)
    return acc.sum()


# --- accumulate_gradients and assign_gradients -------------------------------------------


@pytest.mark.slow_at("True")
@pytest.mark.parametrize("started", [False, True])
def test_eight_threads_accumulate_exactly_into_grad(torch_gt, started):
    import torch

    w = torch.ones(10_000, requires_grad=True)
    w.grad = torch.zeros(10_000) if started else None

    def work(i):
        for _ in range(50):
            torch_gt.accumulate_gradients([w], [torch.full((10_000,), float(i + 1))])

    in_threads(work)
    assert (w.grad == 50 * 36).all()


@pytest.mark.parametrize("tree", ["leaf", "list", "nested"])
def test_targets_are_pytrees(gt, tree):
    a, b = zeros_buffer(gt, {"a": [1.0, 2.0], "b": 3.0}).values()
    ga = f32(gt, [1.0, 2.0])
    target = {"leaf": a, "list": [a, b], "nested": {"z": (a, [b]), "a": b}}[tree]
    grads = {"leaf": ga, "list": (ga, None), "nested": {"z": [ga, None]}}[tree]
    new = gt.accumulate_gradients(gt.accumulate_gradients(target, grads), grads)
    leaf = {"leaf": lambda t: t, "list": lambda t: t[0], "nested": lambda t: t["z"][0]}[tree](new)
    np.testing.assert_array_equal(held(gt, leaf), [2.0, 4.0])
    if tree == "nested":
        assert held(gt, new["a"]) == (None if is_torch(gt) else 0.0)


class Entries:
    """A pytree with the methods of a mapping that iterates over examples, like a TensorDict.

    The class is not a subclass of `collections.abc.Mapping`.
    """

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        return self.entries[key]

    def __iter__(self):
        raise TypeError("iteration over examples")

    def keys(self):
        return self.entries.keys()

    def items(self):
        return self.entries.items()


def registered(gt):
    """Register `Entries` as a pytree of the framework, and return the class."""

    class Registered(Entries):
        pass

    def flattened(x):
        constants = tuple((k, v) for k, v in x.items() if isinstance(v, str))
        arrays = {k: v for k, v in x.items() if not isinstance(v, str)}
        return list(arrays.values()), (tuple(arrays), constants)

    def built(values, context):
        return Registered(dict(zip(context[0], values, strict=True)) | dict(context[1]))

    if is_torch(gt):
        from torch.utils._pytree import register_pytree_node

        register_pytree_node(Registered, flattened, built)
    else:
        import jax

        jax.tree_util.register_pytree_node(Registered, flattened, lambda c, xs: built(xs, c))
    return Registered


@pytest.mark.parametrize("write", ["accumulate_gradients", "assign_gradients"])
@pytest.mark.parametrize("classes", ["both", "target", "grads"])
def test_a_registered_mapping_may_be_the_target_and_the_gradients(gt, classes, write):
    kind = registered(gt)
    buffer = zeros_buffer(gt, {"w": [1.0, 2.0], "v": [3.0], "u": 0.0})
    buffer = {"w": buffer["w"], "inner": {"v": buffer["v"], "u": buffer["u"]}}
    values = {"inner": {"u": None, "v": f32(gt, [5.0])}, "w": f32(gt, [1.0, 2.0])}
    deep = lambda x, **more: kind({"w": x["w"], "inner": kind(x["inner"]), **more})
    name = {"name": "a constant"} if classes == "both" else {}
    target = buffer if classes == "grads" else deep(buffer, **name)
    new = getattr(gt, write)(target, values if classes == "target" else deep(values, **name))
    assert type(new) is type(target)
    np.testing.assert_array_equal(held(gt, new["w"]), [1.0, 2.0])
    np.testing.assert_array_equal(held(gt, new["inner"]["v"]), [5.0])
    assert held(gt, new["inner"]["u"]) == (None if is_torch(gt) else 0.0)
    with pytest.raises(
        GradtoolsError, match=r"grads\['x'\] is not in the target, whose keys at this"
    ):
        getattr(gt, write)(target, kind({"x": f32(gt, 1.0)}))
    with pytest.raises(GradtoolsError, match="grads is a list of 1; expected a dict with keys"):
        getattr(gt, write)(target, [f32(gt, 1.0)])


def test_a_named_tuple_with_a_field_keys_is_no_mapping(gt):
    pair = namedtuple("pair", ["keys", "values"])
    buffer = zeros_buffer(gt, {"a": [1.0, 2.0], "b": 3.0})
    new = gt.accumulate_gradients(pair(buffer["a"], buffer["b"]), pair(f32(gt, [1.0, 2.0]), None))
    np.testing.assert_array_equal(held(gt, new.keys), [1.0, 2.0])


BAD_WRITES = {
    "unknown name": (
        lambda gt: {"w": f32(gt, [1.0, 1.0]), "v": f32(gt, 1.0)},
        r"grads\['v'\] is not in the target, whose keys at this path are 'b', 'w'",
    ),
    "shape": (
        lambda gt: {"b": f32(gt, 1.0), "w": f32(gt, [[1.0, 1.0]])},
        r"grads\['w'\] is float32 of shape \(1, 2\).*; expected float32 of shape \(2,\).*Reduce",
    ),
}


@pytest.mark.parametrize("write", ["accumulate_gradients", "assign_gradients"])
@pytest.mark.parametrize("case", BAD_WRITES)
def test_gradients_that_do_not_fit_are_refused_and_nothing_is_written(gt, case, write):
    make, text = BAD_WRITES[case]
    buffer = zeros_buffer(gt, {"b": 3.0, "w": [1.0, 2.0]})
    before = {name: held(gt, leaf) for name, leaf in buffer.items()}
    with pytest.raises(GradtoolsError, match=f"{write}: {text}"):
        getattr(gt, write)(buffer, make(gt))
    for name, leaf in buffer.items():
        np.testing.assert_array_equal(held(gt, leaf), before[name])


# --- PyTorch: .grad ----------------------------------------------------------------------


def test_a_module_stands_for_its_named_parameters(torch_gt):
    import torch

    net = torch.nn.Linear(2, 1)
    assert torch_gt.accumulate_gradients(net, {"bias": torch.ones(1)}) is net
    assert net.weight.grad is None
    assert net.bias.grad.item() == 1.0


def test_grad_is_added_to_in_place_and_never_is_the_callers_tensor(torch_gt):
    import torch

    w, g = torch.ones(2, requires_grad=True), torch.ones(2)
    torch_gt.accumulate_gradients([w], [g])
    kept = w.grad
    torch_gt.accumulate_gradients([w], [g])
    assert w.grad is kept
    g.fill_(100.0)
    assert w.grad.tolist() == [2.0, 2.0]


def test_assigned_gradients_are_the_given_tensors_without_their_graph(torch_gt):
    import torch

    w, g = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2
    torch_gt.assign_gradients([w], [g])
    assert w.grad.data_ptr() == g.data_ptr() and not w.grad.requires_grad


def test_assigned_gradients_that_share_memory_are_copied(torch_gt):
    import torch

    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    g, row = torch.ones(2), torch.ones(1)
    torch_gt.assign_gradients([a, b], [g, g])
    a.grad += 1
    assert b.grad.tolist() == [1.0, 1.0]
    torch_gt.assign_gradients([a], [row.expand(2)])
    a.grad[0] = 5
    assert (a.grad.tolist(), row.tolist()) == ([5.0, 1.0], [1.0])


def test_gradients_that_are_grad_buffers_are_read_before_they_are_written(torch_gt):
    import torch

    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    a.grad, b.grad = torch.tensor([1.0]), torch.tensor([10.0])
    torch_gt.accumulate_gradients([a, b], [b.grad, a.grad])
    assert (a.grad.item(), b.grad.item()) == (11.0, 11.0)
    a.grad, b.grad = torch.tensor([1.0]), torch.tensor([10.0])
    torch_gt.assign_gradients([a, b], [b.grad, a.grad])
    assert (a.grad.item(), b.grad.item()) == (10.0, 1.0)


def test_a_shared_parameter_adds_both_gradients_and_is_assigned_one(torch_gt):
    import torch

    w = torch.ones(1, requires_grad=True)
    two = [torch.tensor([1.0]), torch.tensor([10.0])]
    torch_gt.accumulate_gradients([w, w], two)
    torch_gt.accumulate_gradients([w, w], two)
    assert w.grad.item() == 22.0
    with pytest.raises(GradtoolsError, match=r"target\[0\] and target\[1\] are one parameter"):
        torch_gt.assign_gradients([w, w], two)
    torch_gt.assign_gradients([w, w], [None, two[1]])
    assert w.grad.item() == 10.0


def test_what_is_written_is_detached_and_enters_no_graph(torch_gt):
    import torch

    w = torch.tensor(2.0, requires_grad=True)
    (g,) = torch.autograd.grad(w**3, w, create_graph=True)
    w.grad = g
    torch_gt.accumulate_gradients(w, g)
    assert w.grad.item() == 24.0
    assert not w.grad.requires_grad
    assert g.item() == 12.0
    assert torch.autograd.grad(g, w)[0].item() == 12.0


@pytest.mark.parametrize("kind", ["expanded", "inference", "sparse"])
def test_a_grad_that_cannot_be_added_to_in_place_is_replaced(torch_gt, kind):
    import torch

    w = torch.ones(2, 2, requires_grad=True)
    with torch.inference_mode():
        inference = torch.ones(2, 2)
    w.grad = {
        "expanded": torch.ones(1, 1).expand(2, 2),
        "inference": inference,
        "sparse": torch.ones(2, 2).to_sparse(),
    }[kind]
    torch_gt.accumulate_gradients(w, torch.ones(2, 2))
    assert (w.grad == 2.0).all()


BAD_TARGETS = {
    "no leaf": (
        lambda torch: torch.ones(2, requires_grad=True) * 2,
        r"target\['w'\] is the result of MulBackward0; expected a leaf tensor",
    ),
    "frozen": (
        lambda torch: torch.ones(2),
        r"target\['w'\] has requires_grad=False; expected a tensor that requires grad. If it is a "
        r"detached copy, .*pass the module or its parameters, .* from module.parameters\(\)",
    ),
    "device": (
        lambda torch: torch.ones(2, device="meta", requires_grad=True),
        r"grads\['w'\] is float32 of shape \(2,\) on cpu; expected .* on meta.*Move the gradient",
    ),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_a_target_without_a_grad_of_its_own_is_refused_and_nothing_is_written(torch_gt, case):
    import torch

    make, text = BAD_TARGETS[case]
    good = torch.ones(2, requires_grad=True)
    with pytest.raises(GradtoolsError, match=f"accumulate_gradients: {text}"):
        torch_gt.accumulate_gradients(
            {"good": good, "w": make(torch)}, {"good": torch.ones(2), "w": torch.ones(2)}
        )
    assert good.grad is None


def test_grad_is_not_written_from_inside_a_transform(torch_gt):
    import torch

    w = torch.ones(2, requires_grad=True)

    def step(g):
        torch_gt.accumulate_gradients(w, g)
        return g

    with pytest.raises(GradtoolsError, match=r"torch.func transform that is still running"):
        torch.func.vmap(step)(torch.ones(3, 2))
    assert w.grad is None


# --- JAX: the returned buffer ------------------------------------------------------------


def test_the_buffer_is_pure_and_may_be_carried_under_jit_and_scan(jax_gt):
    import jax
    import jax.numpy as jnp

    buffer = {"w": jnp.zeros(2), "b": jnp.zeros(())}

    def step(buffer, x):
        return jax_gt.accumulate_gradients(buffer, {"w": x * jnp.ones(2)}), None

    new, _ = jax.jit(lambda b: jax.lax.scan(step, b, jnp.arange(4.0)))(buffer)
    np.testing.assert_array_equal(new["w"], [6.0, 6.0])
    np.testing.assert_array_equal(buffer["w"], [0.0, 0.0])
