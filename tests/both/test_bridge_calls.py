"""Tests calls of bridged functions: arguments, memory, captured tensors, transforms and errors."""

import doctest
import gc
import os
import re
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools import GradtoolsError, bridge
from gradtools.jax.arrays import X64


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def near(found, expected, tolerance=1e-12):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    scale = max(1.0, np.max(np.abs(expected), initial=0.0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


def in_torch(x, w, n=2):
    return {"y": torch.tanh(x @ w) ** n, "s": [torch.sin(x).sum()]}


def in_jax(x, w, n=2):
    return {"y": jnp.tanh(x @ w) ** n, "s": [jnp.sin(x).sum()]}


def loss(f):
    return lambda x, w: (f(x, w, n=3)["y"] ** 2).sum() + f(x, w)["s"][0] ** 3


X, W = rows(3, 4), rows(4, 2, seed=1)

IN_JAX = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "forward over reverse": lambda f: jax.jit(jax.jacfwd(jax.grad(f, 1), 1)),
    "reverse over reverse": lambda f: jax.jit(jax.jacrev(jax.grad(f, 1), 1)),
    "reverse over forward": lambda f: jax.jit(jax.jacrev(jax.jacfwd(f, 1), 1)),
    "third order": lambda f: jax.jit(
        jax.grad(lambda x, w: (jax.hessian(f, 1)(x, w) ** 2).sum(), (0, 1))
    ),
    "scan": lambda f: jax.jit(
        jax.grad(
            lambda x, w: jax.lax.scan(
                lambda c, _: (c - 0.1 * jax.grad(f)(c, w), None), x, None, length=3
            )[0].sum(),
            (0, 1),
        )
    ),
    "cond": lambda f: jax.jit(
        jax.grad(lambda x, w: jax.lax.cond(x[0, 0] > 9, lambda *a: 0.0, f, x, w))
    ),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f), (0, 1))),
    "vmap of grad": lambda f: (
        lambda x, w: jax.vmap(jax.grad(f), (0, None))(jnp.stack([x, 2 * x]), w)
    ),
    "vmap of vmap": lambda f: jax.jit(
        lambda x, w: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(
            jnp.stack([x, 2 * x]), jnp.stack([w, 3 * w, -w])
        )
    ),
    "gradtools' hvp": lambda f: lambda x, w: gj.hvp(f, (x, w), (x, w))[1],
    "gradtools' reversal": lambda f: (
        lambda x, w: gj.grad(lambda x, w: f(gj.reverse_gradient(x), w))(x, w)
    ),
}


@pytest.mark.quick_at("vmap of vmap")
@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize("name", IN_JAX)
def test_a_torch_function_composes_with_the_transforms_of_jax(name):
    of = IN_JAX[name]
    found = of(loss(bridge.to_jax(in_torch)))(jnp.asarray(X), jnp.asarray(W))
    expected = of(loss(in_jax))(jnp.asarray(X), jnp.asarray(W))
    jax.tree.map(near, found, expected)


def backward(f):
    def both(x, w):
        x, w = (a.detach().clone().requires_grad_() for a in (x, w))
        f(x, w).backward()
        return x.grad, w.grad

    return both


def pushed(f):
    def along(x, w):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, 2 * x)
            return torch.autograd.forward_ad.unpack_dual(f(dual, w)).tangent

    return along


func = torch.func
IN_TORCH = {
    "backward": backward,
    "dual numbers": pushed,
    "func.grad": lambda f: func.grad(f, (0, 1)),
    "forward over reverse": lambda f: func.jacfwd(func.grad(f, 1), 1),
    "reverse over reverse": lambda f: func.jacrev(func.grad(f, 1), 1),
    "double backward": lambda f: lambda x, w: gt.hvp(f, (x, w), (x, w))[1],
    "third order": lambda f: func.grad(lambda x, w: (func.hessian(f, 1)(x, w) ** 2).sum(), (0, 1)),
    "vmap of grad": lambda f: (
        lambda x, w: func.vmap(func.grad(f), (0, None))(torch.stack([x, 2 * x]), w)
    ),
    "checkpoint": lambda f: backward(
        lambda x, w: torch.utils.checkpoint.checkpoint(f, x, w, use_reentrant=False)
    ),
    "gradtools' checkpoint": lambda f: backward(gt.checkpoint(f)),
    "compile of grad": lambda f: torch.compile(func.grad(f, (0, 1)), backend="eager"),
    "backward of compile": lambda f: backward(
        torch.compile(f, backend="aot_eager", fullgraph=True)
    ),
}


@pytest.mark.quick_at("func.grad", "checkpoint")
@pytest.mark.sweep_at(
    "forward over reverse", "third order", "compile of grad", "backward of compile"
)
@pytest.mark.parametrize("name", IN_TORCH)
def test_a_jax_function_composes_with_the_transforms_of_torch(name):
    of = IN_TORCH[name]
    found = of(loss(bridge.to_torch(in_jax)))(torch.from_numpy(X), torch.from_numpy(W))
    expected = of(loss(in_torch))(torch.from_numpy(X), torch.from_numpy(W))
    torch.utils._pytree.tree_map(lambda a, b: near(a.detach(), b.detach()), found, expected)


def test_a_zero_without_memory_arrives_as_zeros():
    # PyTorch's forward mode creates zero tensors without storage.
    zero = torch._efficientzerotensor(3, 4, dtype=torch.float64)
    for t in (zero, zero.T, zero.conj()):
        near(bridge.to_torch(lambda a: a @ a.T)(t), np.zeros((t.shape[0],) * 2))


def test_a_round_trip_is_the_function_at_both_orders():
    there_and_back = bridge.to_torch(lambda *args, **kw: bridge.to_jax(in_torch)(*args, **kw))
    x, w = torch.from_numpy(X), torch.from_numpy(W)
    found = gt.hvp(loss(there_and_back), (x, w), (x, w))
    expected = gt.hvp(loss(in_torch), (x, w), (x, w))
    torch.utils._pytree.tree_map(lambda a, b: near(a, b), found, expected)
    back_and_there = bridge.to_jax(lambda *args, **kw: bridge.to_torch(in_jax)(*args, **kw))
    x, w = jnp.asarray(X), jnp.asarray(W)
    jax.tree.map(near, jax.grad(loss(back_and_there))(x, w), jax.grad(loss(in_jax))(x, w))


def test_complex_gradients_are_each_frameworks_own_convention():
    z = np.array([1 + 2j, -0.5j])
    f = bridge.to_jax(lambda z: (torch.abs(z) ** 2 * torch.real(z)).sum())
    native = lambda z: (jnp.abs(z) ** 2 * jnp.real(z)).sum()
    for of in (jax.grad, gj.grad, lambda f: jax.jit(jax.grad(f))):
        near(of(f)(jnp.asarray(z)), of(native)(jnp.asarray(z)))
    # derived by hand: df/dRe + i df/dIm
    near(gj.grad(f)(jnp.asarray(z)), 2 * z * z.real + abs(z) ** 2)
    g = bridge.to_torch(native)
    near(gt.grad(g)(torch.from_numpy(z)), 2 * z * z.real + abs(z) ** 2)


def test_integers_booleans_numbers_and_words_go_across_and_have_no_derivative():
    def f(x, rows, mask, scale, how):
        y = torch.where(mask, x[rows], torch.zeros(()).to(x)) * scale
        return (y**3 if how == "cube" else y), x.argmax(), mask.any()

    args = (jnp.asarray(X), jnp.asarray([0, 2]), jnp.asarray([True, False, True, True]))
    y, where, any_ = bridge.to_jax(f)(*args, 2.0, how="cube")
    assert where.dtype == jnp.int64 and int(where) == X.argmax() and bool(any_)
    near(y, (np.where([True, False, True, True], X[[0, 2]], 0) * 2) ** 3)
    by = lambda f: jax.grad(lambda x: f(x)[0].sum(), allow_int=True)
    found = by(lambda x: bridge.to_jax(f)(x, *args[1:], 2.0, how="cube"))(args[0])
    expected = np.zeros_like(X)
    expected[[0, 2]] = np.where([True, False, True, True], 24 * X[[0, 2]] ** 2, 0)
    near(found, expected)


@pytest.mark.parametrize("f", [lambda x: x.sum().item(), lambda x: [x.detach().numpy()]])
def test_a_result_without_a_tensor_has_a_value_and_is_refused_when_differentiated(f):
    x, metric = jnp.asarray(X), bridge.to_jax(f)
    near(jax.tree.leaves(metric(x))[0], jax.tree.leaves(f(torch.from_numpy(X)))[0], 1e-6)
    loss = lambda x: sum(y.sum() for y in jax.tree.leaves(metric(x)))
    for of in (jax.grad(loss), gj.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(GradtoolsError, match=r"differentiated, but returned an? (float|ndarr)"):
            of(x)
    near(jax.grad(lambda x: ((x**2).sum(), metric(x)), has_aux=True)(x)[0], 2 * X)
    near(jax.grad(lambda x: x.sum() * loss(jax.lax.stop_gradient(x)))(x), loss(x) + 0 * X)
    mixed = bridge.to_jax(lambda x: {"loss": (x**2).sum(), "scale": 0.5, "metric": f(x)})
    near(jax.grad(lambda x: mixed(x)["loss"] * mixed(x)["scale"])(x), X)
    near(jax.jvp(lambda x: mixed(x)["loss"], (x,), (x,))[1], 2 * (X**2).sum())


@pytest.mark.sampled(1, 18)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex128"])
def test_each_dtype_and_shape_keeps_its_bits_both_ways_traced_or_not(dtype, shape):
    x = jnp.asarray(rows(*shape) * 3).astype(dtype)
    same = bridge.to_jax(lambda t: t.clone())
    for f in (same, jax.jit(same), bridge.to_jax(lambda t: bridge.to_torch(lambda a: a)(t))):
        assert f(x).dtype == x.dtype and f(x).shape == x.shape
        assert np.array_equal(np.asarray(f(x)), np.asarray(x))


def test_arguments_are_not_copied():
    seen = []
    f = bridge.to_jax(lambda t: seen.append(t.data_ptr()) or t + 1)
    x = jnp.ones((50, 50))
    f(x)  # the first call inspects f with a copy of x
    f(x)
    assert seen[-1] == x.unsafe_buffer_pointer()
    inside = []
    g = bridge.to_torch(lambda a: inside.append(a.unsafe_buffer_pointer()) or a + 1, jit=False)
    t = torch.ones(50, 50)
    g(t)
    assert inside == [t.data_ptr()]


def test_a_result_that_pytorch_holds_and_writes_later_is_a_copy():
    table, x = torch.zeros(40, 40), jnp.ones((40, 40))
    z = bridge.to_jax(lambda t: table)(x)
    table.add_(1)
    assert float(jnp.abs(z).max()) == 0


def test_a_result_may_be_written_while_jax_holds_it():
    table = jnp.zeros(40)
    for jit in (True, False):
        bridge.to_torch(lambda a: table, jit=jit)(torch.ones(40)).add_(1)
    near(table, np.zeros(40))


def test_a_tensor_written_after_the_call_changes_no_result():
    t = torch.ones(30, 30)
    for f in (lambda a: a, lambda a: a @ a, lambda a: (a, a.T)):
        y = bridge.to_torch(f)(t)
        before = [u.clone() for u in (y if isinstance(y, tuple) else (y,))]
        t.add_(1)
        after = y if isinstance(y, tuple) else (y,)
        assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_function_that_writes_in_its_argument_gets_a_copy(around):
    f = around(bridge.to_jax(lambda t: t.add_(1) * 2))
    x = jnp.zeros(4)
    for _ in range(3):
        near(f(x), 2 * np.ones(4))
        near(x, np.zeros(4))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_bridged_function_has_its_gradient_in_inference_mode(around):
    f = bridge.to_jax(lambda t: t.sin().sum())
    with torch.inference_mode():
        near(around(jax.grad(f))(jnp.ones(3)), np.cos(np.ones(3)))


def test_a_bridged_function_and_what_it_closes_over_are_freed():
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)

    def f(t, big=big):
        return t * 2

    cross = bridge.to_jax(f)
    jax.grad(lambda x: cross(x).sum())(jnp.ones(2))
    f = big = cross = None
    for _ in range(3):
        gc.collect()
    assert gone() is None


# --- shapes, captures and errors ---------------------------------------------------------


def test_a_shape_that_depends_on_values_is_said_by_out():
    f = lambda t: t[t > 0] * 2
    x = jnp.asarray([1.0, -1.0, 2.0])
    near(bridge.to_jax(f)(x), [2, 4])
    with pytest.raises(GradtoolsError, match=r"to_jax: .*<lambda>.*out=ArraySpec\(shape"):
        jax.jit(bridge.to_jax(f))(x)
    told = jax.jit(bridge.to_jax(f, out=gj.ArraySpec((2,), "float64")))
    near(told(x), [2, 4])
    near(jax.grad(lambda x: (told(x) ** 2).sum())(x), [8, 0, 16])
    told = bridge.to_jax(f, out=lambda t: gj.ArraySpec((t.shape[0] - 1,), t.dtype))
    near(jax.jit(told)(x), [2, 4])


def test_the_derivative_at_an_argument_is_right_where_a_parameter_is_captured():
    net = torch.nn.Linear(3, 2).double()
    f = bridge.to_jax(lambda t: net(t))
    x, expected = jnp.ones(3), net.weight.detach().sum(0)
    near(jax.grad(lambda x: f(x).sum())(x), expected)
    near(jax.jit(jax.grad(lambda x: f(x).sum()))(x), expected)
    assert net.weight.grad is None


def test_random_numbers_are_refused_by_name():
    dropout = torch.nn.Dropout(0.5)
    before = torch.get_rng_state()
    for around in (lambda f: f, jax.grad):
        with pytest.raises(GradtoolsError, match=r"to_jax: .*draws random numbers"):
            around(bridge.to_jax(lambda t: dropout(t).sum()))(jnp.ones(3))
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * float(x[0]),
        lambda x: jnp.asarray(np.asarray(x)),
        lambda x: x[x > 0],
    ],
)
def test_a_jax_function_that_reads_values_is_told_to_go_without_jit(f):
    t = torch.ones(3, requires_grad=True)
    for call in (lambda: bridge.to_torch(f)(t.detach()), lambda: bridge.to_torch(f)(t)):
        with pytest.raises(GradtoolsError, match=r"to_torch\(f, .*jit=False\)"):
            call()
    assert torch.equal(bridge.to_torch(f, jit=False)(t.detach()), t)


def test_arrays_of_the_wrong_framework_are_refused_by_name():
    with pytest.raises(
        GradtoolsError,
        match=r"^to_jax: the function that to_jax returns takes arrays of JAX; got an array of",
    ):
        bridge.to_jax(lambda t: t)(torch.ones(2))
    with pytest.raises(GradtoolsError, match=r"to_torch|jax"):
        bridge.to_torch(lambda t: t)(jnp.ones(2))
    array = "an array of shape (2,) and dtype float32"
    product = lambda x, y: x * y
    for made, args, words in (
        (bridge.to_torch(torch.sin), (torch.ones(2),), f"sin with arrays of JAX: sin({array})."),
        (
            bridge.to_jax(jnp.sin),
            (jnp.float32([1, 1]),),
            f"sin with arrays of PyTorch: sin({array}).",
        ),
        (bridge.to_torch(product), (torch.ones(2), "2"), f"<lambda>({array}, a str)."),
    ):
        with pytest.raises(TypeError) as caught:
            made(*args)
        assert any(note.endswith(words) for note in caught.value.__notes__)
    with pytest.raises(GradtoolsError, match="to_jax: got an int; expected a function or a model"):
        bridge.to_jax(3)
    with pytest.raises(
        GradtoolsError, match="to_torch: got an int; expected a function or a model"
    ):
        bridge.to_torch(3)
    linen = pytest.importorskip("flax.linen")
    with pytest.raises(GradtoolsError, match=r"got a tuple; .* to_torch\(module, variables=var"):
        bridge.to_torch((linen.Dense(2), {"params": {}}))
    with pytest.raises(GradtoolsError, match=r"to_jax: .* typed key.*jax.random.key_data"):
        bridge.to_jax(lambda t: t)(jax.random.key(0))


@pytest.mark.slow
def test_without_x64_wide_dtypes_are_refused_and_never_narrowed():
    program = f"""
import jax.numpy as jnp, torch
from gradtools import bridge, GradtoolsError
for f, x in (
    (bridge.to_jax(lambda t: t.double()), jnp.ones(2)),
    (bridge.to_jax(lambda t: t.argmax()), jnp.ones(2)),
    (bridge.to_torch(lambda a: a), torch.ones(2).double()),
):
    try:
        f(x)
    except GradtoolsError as error:
        assert {X64!r} in str(error), error
    else:
        raise AssertionError
print("refused")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "refused\n", found.stderr[-2000:]


def test_the_docstrings_examples_run():
    jax.config.update("jax_enable_x64", False)
    try:
        for f in (bridge.to_jax, bridge.to_torch):
            runner = doctest.DocTestRunner()
            for test in doctest.DocTestFinder().find(f, f.__name__, globs={}):
                runner.run(test)
            assert runner.failures == 0 and runner.tries >= 5
    finally:
        jax.config.update("jax_enable_x64", True)


def test_a_host_kernel_of_jax_that_calls_jax_is_refused_under_jit_and_not_hung():
    f = bridge.to_jax(lambda t: bridge.to_torch(lambda a: a * 2)(t), out=lambda t: t)
    near(f(jnp.ones(2)), [2, 2])
    with pytest.raises(Exception, match=re.escape("it calls JAX, which is not allowed")):
        jax.jit(f)(jnp.ones(2))


def test_a_device_that_jax_does_not_have_is_named():
    x = torch.empty(3, device="meta")
    with pytest.raises(GradtoolsError, match="an argument of sin is on meta, and JAX has no such"):
        bridge.to_torch(jnp.sin)(x)
    with pytest.raises(GradtoolsError, match="'weight' of Linear is on meta, and JAX has no such"):
        bridge.to_jax(torch.nn.Linear(2, 2, device="meta"))


@pytest.mark.slow
def test_a_result_is_on_the_device_of_the_arguments():
    program = """
import jax, jax.numpy as jnp, numpy as np
from gradtools import GradtoolsError, bridge

f = bridge.to_jax(lambda *ts: sum(t * t for t in ts))
zeroth, first = (jax.device_put(jnp.arange(3.0), device) for device in jax.devices())
for x in (zeroth, first):
    y = f(x) + x
    assert y.devices() == x.devices()
    g = jax.grad(lambda x: (f(x) * x).sum())(x)
    assert g.devices() == x.devices()
    np.testing.assert_allclose(g, 3 * np.arange(3.0) ** 2)
assert (f(jnp.arange(3.0)) + first).devices() == first.devices()  # uncommitted arrays move
mesh = jax.make_mesh((2,), ("a",))
spread = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("a")))
assert (f(spread) + spread).sharding.is_equivalent_to(spread.sharding, 1)
try:
    f(zeroth, first)
except GradtoolsError as error:
    assert "committed to different devices" in str(error), error
    print("refused")
"""
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=flags
    )
    assert found.stdout == "refused\n", found.stderr[-2000:]


@pytest.mark.whole_at("jit")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_function_that_writes_in_its_argument_has_every_derivative(around):
    f = bridge.to_jax(lambda t: (t.mul_(2).sub_(1) ** 2).sum())
    x = jnp.asarray([1.0, 2.0])
    near(around(jax.grad(f))(x), [4, 12])
    near(around(jax.hessian(f))(x), 8 * np.eye(2))
    near(around(jax.vmap(jax.grad(f)))(jnp.stack([x, x])), [[4, 12]] * 2)
    near(x, [1, 2])


def test_an_autocast_of_pytorch_around_the_program_changes_no_number_of_jax():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
    f = bridge.to_jax(lambda t: t @ t)
    wanted = np.asarray(f(x))
    with torch.autocast("cpu", torch.bfloat16):
        for call in (f, jax.jit(f)):
            assert call(x).dtype == jnp.float32
            np.testing.assert_array_equal(call(x), wanted)


# --- functions with only a reverse rule


@pytest.mark.parametrize("way", [gt.jvp, torch.func.jvp])
def test_forward_mode_of_a_function_with_a_custom_vjp_is_refused_in_words(way):
    square = jax.custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, c: (2 * x * c,))
    f, x = bridge.to_torch(lambda x: square(x).sum()), torch.tensor([1.0, 3.0])
    with pytest.raises(GradtoolsError, match=r"^to_torch: f contains a function with a rev"):
        way(f, (x,), (x,))
    assert torch.equal(gt.hessian(f)(x), 2 * torch.eye(2))
    assert torch.equal(gt.grad(f)(x), 2 * x)
