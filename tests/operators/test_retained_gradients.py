"""Compares `retain_gradient` and `retained_gradients` to gradients with respect to added zeros."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gradtools import GradtoolsError

STEPS = 4


@pytest.fixture
def wx(gt, rng):
    return gt.asarray(rng.normal(size=(3, 3))), gt.asarray(rng.normal(size=(5, 3)))


def agree(gt, found, expected, rtol=1e-10):
    np.testing.assert_allclose(gt.to_numpy(found), gt.to_numpy(expected), rtol, 1e-12)


def layer(gt, w, x, name="h"):
    return gt.retain_gradient(gt.xp.tanh(x @ w), name)


def steps(gt):
    """Return a program with a Python loop that marks four values with one name."""

    def f(w, x):
        for _ in range(STEPS):
            x = layer(gt, w, x)
        return (x**2).sum()

    return f


def added(gt, w, x):
    """Return the gradients with respect to zeros that are added at the marks of `steps`."""

    def f(ds):
        h = x
        for i in range(STEPS):
            h = gt.xp.tanh(h @ w) + ds[i]
        return (h**2).sum()

    return gt.grad(f)(gt.asarray(np.zeros((STEPS, *x.shape))))


def penalty(gt, f, x):
    return lambda w: (gt.retained_gradients(f)(w, x)[2]["h"] ** 2).sum()


def programs(gt, backend_name):
    """Return programs that apply the same layers as `steps` with other control flow."""
    one, shared = lambda w, x: layer(gt, w, x), (None, 0)

    def repeated(step):
        def f(w, x):
            for _ in range(STEPS):
                x = step(w, x)
            return x

        return f

    found = {
        "a loop": repeated(one),
        "vmap": gt.vmap(repeated(one), in_axes=shared),
        "checkpoint": repeated(gt.checkpoint(one)),
    }
    if backend_name == "torch":
        from torch.utils.checkpoint import checkpoint

        native = lambda w, x: checkpoint(one, w, x, use_reentrant=False)
        return found | {"PyTorch's checkpoint": repeated(native)}
    import jax

    def scanned(step, count):
        body = lambda w: lambda x, _: (step(w, x), None)
        return lambda w, x: jax.lax.scan(body(w), x, None, length=count)[0]

    fori = lambda w, x: jax.lax.fori_loop(0, STEPS, lambda _, x: one(w, x), x)
    maybe = lambda w, x: jax.lax.cond(x.sum() < 1e6, one, lambda w, x: x, w, x)
    return found | {
        "jit": repeated(jax.jit(one)),
        "scan": scanned(one, STEPS),
        "scan in scan": scanned(scanned(one, 2), 2),
        "scan of remat": scanned(jax.checkpoint(one), STEPS),
        "fori_loop": fori,
        "cond": repeated(maybe),
        "scan in vmap": jax.vmap(scanned(one, STEPS), in_axes=shared),
    }


NAMES = {
    "torch": ["PyTorch's checkpoint"],
    "jax": ["jit", "scan", "scan in scan", "scan of remat", "fori_loop", "cond", "scan in vmap"],
}
COMMON = ["a loop", "vmap", "checkpoint"]


@pytest.mark.parametrize("way", [*COMMON, *NAMES["torch"], *NAMES["jax"]])
def test_marks_in_loops_and_recomputed_code_are_stacked(gt, backend_name, wx, way):
    found = programs(gt, backend_name)
    assert set(found) == {*COMMON, *NAMES[backend_name]}
    if way not in found:
        return
    (w, x), f = wx, lambda w, x: (found[way](w, x) ** 2).sum()
    value, g, retained = gt.retained_gradients(f)(w, x)
    agree(gt, value, steps(gt)(w, x))
    agree(gt, g, gt.grad(steps(gt))(w, x))
    agree(gt, retained["h"], added(gt, w, x))
    of_added = lambda w: (added(gt, w, x) ** 2).sum()
    agree(gt, gt.grad(penalty(gt, f, x))(w), gt.grad(of_added)(w))


@pytest.mark.slow_at(("jax", "twice"), ("jax", "checkpoint in chunked"))
@pytest.mark.parametrize("way", ["chunked", "twice", "checkpoint in chunked"])
def test_each_chunk_is_an_occurrence(gt, wx, way):
    (w, x), one = wx, lambda w, x: layer(gt, w, x)
    chunks = lambda f, size: gt.chunked(f, size, in_axes=(None, 0))
    step = {
        "chunked": lambda: chunks(one, 2),
        "twice": lambda: chunks(chunks(one, 2), 4),
        "checkpoint in chunked": lambda: chunks(gt.checkpoint(one), 2),
    }[way]()

    def f(w, x):
        for _ in range(STEPS):
            x = step(w, x)
        return (x**2).sum()

    found = gt.retained_gradients(f)(w, x)[2]["h"]
    assert [y.shape[0] for y in found] == [2, 2, 1] * STEPS
    expected = added(gt, w, x)
    agree(gt, gt.xp.concatenate(found), expected.reshape((-1, 3)))
    squares = lambda w: sum((h**2).sum() for h in gt.retained_gradients(f)(w, x)[2]["h"])
    agree(gt, gt.grad(squares)(w), gt.grad(lambda w: (added(gt, w, x) ** 2).sum())(w))
    equal = gt.retained_gradients(f)(w, x[:4])[2]["h"]
    agree(gt, equal, added(gt, w, x[:4]).reshape((2 * STEPS, 2, 3)))


@pytest.mark.slow_at("jax")
def test_retained_gradients_compose_with_the_transforms(gt, backend_name, wx):
    w, x = wx
    f, t = steps(gt), wx[0] * 0.3
    one, of_added = penalty(gt, f, x), lambda w: (added(gt, w, x) ** 2).sum()
    agree(gt, gt.jvp(one, (w,), (t,))[1], gt.jvp(of_added, (w,), (t,))[1])
    agree(gt, gt.hvp(one, (w,), (t,))[1][0], gt.hvp(of_added, (w,), (t,))[1][0])
    rows = gt.vmap(lambda w: gt.retained_gradients(f)(w, x)[2]["h"])
    both = gt.xp.stack([w, t])
    agree(gt, rows(both), gt.xp.stack([added(gt, w, x), added(gt, t, x)]))
    each = gt.per_example_grad(lambda w, x: penalty(gt, f, x[None])(w))(w, x)
    agree(gt, each[1], gt.grad(penalty(gt, f, x[1:2]))(w))
    if backend_name == "jax":
        import jax

        agree(gt, jax.jit(gt.retained_gradients(f))(w, x)[2]["h"], added(gt, w, x))
        agree(gt, jax.hessian(one)(w), gt.hessian(of_added)(w))
    else:
        import torch

        agree(gt, torch.func.hessian(one)(w), gt.hessian(of_added)(w))


def test_a_mark_inside_of_an_inner_gradient_counts_for_the_outer_value(gt, wx):
    w, x = wx

    def f(mark):
        inner = lambda x: (mark(gt.xp.tanh(x @ w)) ** 2).sum()
        return lambda x: (gt.grad(inner)(x) ** 2).sum()

    retained = gt.retained_gradients(f(lambda h: gt.retain_gradient(h, "h")))(x)[2]
    agree(gt, retained["h"], gt.grad(lambda d: f(lambda h: h + d)(x))(0 * x))


def test_trees_names_complex_values_and_no_arguments(gt, wx):
    w, x = wx

    def f(w, x):
        tree = gt.retain_gradient({"a": x @ w, "n": 2, "b": [x]}, "tree")
        alone = gt.retain_gradient(x.sum(), "unused")
        return (tree["a"] ** tree["n"]).sum() + 3 * tree["b"][0].sum(), alone

    (_, aux), g, retained = gt.retained_gradients(f, has_aux=True)(w, x)
    agree(gt, retained["tree"]["a"], 2 * (x @ w))
    agree(gt, retained["tree"]["b"][0], 0 * x + 3)
    assert retained["tree"]["n"] is None and float(retained["unused"]) == 0
    agree(gt, aux, x.sum())
    agree(gt, g, gt.grad(f, has_aux=True)(w, x)[0])
    empty = gt.retained_gradients(f, (), has_aux=True)(w, x)
    assert empty[1] == ()
    agree(gt, empty[2]["tree"]["a"], retained["tree"]["a"])
    assert gt.retained_gradients(lambda x: x.sum(), ())(x)[1:] == ((), {})
    pair = gt.retained_gradients(f, (0, 1), has_aux=True)(w, x)[1]
    agree(gt, pair[1], gt.grad(f, 1, has_aux=True)(w, x)[0])

    z = gt.asarray(np.array([1 + 2j, 3 - 1j]))
    g = lambda z: (z * (2 + 1j)).real.sum()
    retained = gt.retained_gradients(lambda z: g(gt.retain_gradient(z * z, "q")))(z)[2]
    agree(gt, retained["q"], gt.grad(g)(z * z))


def test_values_of_different_shapes_under_one_name_give_a_list(gt, wx):
    mark = lambda x: gt.retain_gradient(x, "a").sum()
    retained = gt.retained_gradients(lambda x: mark(x) + 2 * mark(x[0]))(wx[1])[2]
    assert [tuple(x.shape) for x in retained["a"]] == [(5, 3), (3,)]
    assert float(retained["a"][1][0]) == 2


def test_the_value_keeps_its_bits(gt):
    zeros = gt.asarray(np.array([0.0, -0.0]))

    def inverse(x):
        y = 1 / gt.retain_gradient(x, "x")
        return y.sum(), y

    (_, aux), _, _ = gt.retained_gradients(inverse, has_aux=True)(zeros)
    assert gt.to_numpy(aux).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize(
    "within", ["frozen", "grad(mode='forward_over_reverse')", "implicit_solution"]
)
def test_a_mark_whose_gradient_cannot_be_retained_is_refused(gt, wx, within):
    w, x = wx

    def f(x):
        if within == "frozen":
            return gt.frozen(lambda x: layer(gt, w, x))(x).sum()
        if within == "implicit_solution":
            return gt.implicit_solution(lambda z, x: gt.retain_gradient(z, "h") - x, abs)(x).sum()
        inner = lambda x: gt.retain_gradient(x**3, "h").sum()
        return gt.grad(inner, mode="forward_over_reverse")(x).sum()

    agree(gt, gt.grad(f)(abs(x)), gt.grad(f)(abs(x)))  # without `retained_gradients` marks work
    with pytest.raises(GradtoolsError, match=f"is marked inside of {re.escape(within)}, where"):
        gt.retained_gradients(f)(abs(x))


def test_a_mark_in_g_of_mixed_partial(gt, wx):
    x = wx[1]

    def f(x, d):
        G = lambda z: gt.retain_gradient(z**2 + d, "h") ** 2
        return gt.mixed_partial(lambda y, g: (y * g).sum() ** 2, G, x, x, [x, x])[0].sum()

    zero = 0 * x
    retained = gt.retained_gradients(f)(x, zero)[2]["h"]
    agree(gt, retained, gt.grad(f, argnums=1)(x, zero))


def test_jax_programs_have_no_operation_for_a_mark(backend_name, gt, wx):
    if backend_name != "jax":
        assert gt.retain_gradient(wx[0], "w") is wx[0]
        return
    import jax

    texts = []
    for mark in (lambda x: gt.retain_gradient(x, "h"), lambda x: x):

        def f(w, x, mark=mark):
            return mark(jax.numpy.tanh(mark(x @ w))).sum()

        texts.append(jax.jit(f).lower(*wx).as_text())
    assert texts[0] == texts[1]
    loop = lambda x: jax.lax.while_loop(
        lambda x: x.sum() < 0, lambda x: gt.retain_gradient(2 * x, "h"), x
    )
    with pytest.raises(GradtoolsError, match=r"'h' is marked inside of while"):
        gt.retained_gradients(lambda x: loop(x).sum())(wx[1])


def test_a_modules_retained_gradients_are_those_of_retain_grad(backend_name, gt):
    if backend_name != "torch":
        return
    import torch

    def network(mark):
        torch.manual_seed(0)
        m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        return m, lambda m, x: (m[2](m[1](mark(m[0](x)))) ** 2).sum()

    x, seen = torch.ones(5, 3), []
    module, f = network(lambda h: gt.retain_gradient(h, "h"))
    plain, g = network(lambda h: seen.append(h) or h.retain_grad() or h)
    torch.manual_seed(1)
    _, grads, retained = gt.retained_gradients(f)(module, x)
    torch.manual_seed(1)
    g(plain, x).backward()
    assert torch.equal(retained["h"], seen[0].grad)
    assert torch.equal(grads["0.weight"], plain[0].weight.grad)
    assert module[0].weight.grad is None
    torch.manual_seed(1)
    (gt.retained_gradients(f)(module, x)[2]["h"] ** 2).sum().backward()
    torch.manual_seed(1)
    plain, g = network(lambda h: seen.append(h) or h)
    torch.manual_seed(1)
    by_hand = torch.autograd.grad(g(plain, x), seen[-1], create_graph=True)[0]
    (by_hand**2).sum().backward()
    torch.testing.assert_close(module[2].weight.grad, plain[2].weight.grad)
    with torch.no_grad():
        assert not gt.retained_gradients(f)(module, x)[2]["h"].requires_grad
        assert gt.retained_gradients(f)(module, x)[2]["h"].abs().sum() > 0


@pytest.mark.slow
def test_compiled_code_with_marks(backend_name, gt, wx):
    if backend_name != "torch":
        return
    import torch
    from torch._dynamo.testing import CompileCounter

    (w, x), frames = wx, CompileCounter()
    compiled = torch.compile(steps(gt), backend=frames, fullgraph=True)
    agree(gt, compiled(w, x), steps(gt)(w, x))
    assert frames.frame_count == 1
    in_parts = torch.compile(steps(gt), backend="aot_eager")
    in_parts(w, x)
    agree(gt, gt.retained_gradients(in_parts)(w, x)[2]["h"], added(gt, w, x))
    agree(gt, in_parts(w, x), steps(gt)(w, x))
    retained = lambda w, x: gt.retained_gradients(steps(gt))(w, x)[2]["h"]
    whole = torch.compile(retained, backend="aot_eager")
    agree(gt, whole(w, x), added(gt, w, x))


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_retained_gradient_is_not_summed_over_the_devices_of_a_shard_map(
    backend_name, gt, wx, is_scanned
):
    if backend_name != "jax":
        pytest.skip("shard_map runs only in jax")
    import jax
    from jax.sharding import PartitionSpec as P

    def f(w, x):
        body = lambda x, _: (layer(gt, w, x), None)
        x = jax.lax.scan(body, x, None, STEPS)[0] if is_scanned else layer(gt, w, x)
        return (x**2).sum()

    def of_device(w, x):
        w = jax.lax.pcast(w, "d", to="varying")
        return gt.retained_gradients(f)(w, x)[2]["h"][None]

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    assert "psum" not in str(jax.make_jaxpr(sharded)(*wx))
    agree(gt, sharded(*wx)[0], gt.retained_gradients(f)(*wx)[2]["h"])
