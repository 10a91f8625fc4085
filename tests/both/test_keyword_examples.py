"""Operators split keyword arguments like positional arguments; NumPy computes the reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from gradtools import GradtoolsError

N = 5
RNG = np.random.default_rng(0)
W, X, MASK = RNG.normal(size=3), RNG.normal(size=(N, 3)), RNG.integers(0, 2, (N, 3)) * 1.0
BIAS, SHARED = RNG.normal(size=N), RNG.normal(size=3)
SIZES = (2, 7)


def of_rows(gt):
    """Return f with one output per row of x.

    The arguments w and shared are not split; scale and power are not arrays.
    """

    def f(w, x, mask=1.0, more=None, shared=0.0, *, scale=1.0, power=1):
        bias = 0.0 if more is None else more["bias"] + more["flag"]
        return gt.xp.tanh((x * mask + shared) @ w) * scale + bias**power

    return f


def expected(x, mask=1.0, bias=0.0, shared=0.0, scale=1.0, power=1):
    """Return f of all rows and the derivative of each output with respect to w."""
    masked = x * mask + shared
    t = np.tanh(masked @ W)
    return t * scale + bias**power, scale * (1 - t**2)[:, None] * masked


# WAYS contains the positional arguments after w, the keyword arguments and values of in_axes.
ARRAYS = {"mask": MASK, "more": {"bias": BIAS, "flag": 1.0}}
FULL = expected(X, MASK, BIAS + 1.0)
WAYS = {
    "all by position": (("x", "mask", "more"), (), [None, (None, 0, 0, {"bias": 0, "flag": None})]),
    "one by keyword": (("x", "mask"), ("more",), [None, (None, 0, 0), {}]),
    "all but one by keyword": (("x",), ("mask", "more"), [None, (None, 0), {"w": None}]),
    "all by keyword": ((), ("x", "mask", "more"), [None, (None,), {"w": None, "x": 0}]),
    "in another order": ((), ("more", "mask", "x"), [None, {"mask": 0, "x": 0, "w": None}]),
}


def data(gt, x):
    if isinstance(x, dict):
        return {k: data(gt, v) for k, v in x.items()}
    return gt.asarray(x) if isinstance(x, np.ndarray) else x


def loss_of(gt, out):
    """Compute a loss that is not a sum over the examples."""
    return (out**2).sum() ** 1.5


def slope(out, rows):
    """Return d(loss)/dw, derived by hand."""
    return 3 * (out**2).sum() ** 0.5 * out @ rows


def close(gt, found, wanted):
    np.testing.assert_allclose(gt.to_numpy(found), wanted, rtol=1e-12, atol=1e-12)


def check_chunked(gt, f, args, kwargs, axes, wanted, sizes=SIZES):
    out, rows = wanted
    for size in sizes:
        ours = gt.chunked(f, size, in_axes=axes)
        close(gt, ours(*args, **kwargs), out)
        of_w = lambda w, ours=ours: loss_of(gt, ours(w, *args[1:], **kwargs))
        close(gt, gt.grad(of_w)(args[0]), slope(out, rows))


def check_microbatched(gt, f, args, kwargs, axes, wanted, sizes=SIZES):
    out, rows = wanted
    for size in sizes:
        mean = functools.wraps(f)(lambda *a, **k: f(*a, **k).mean())
        ours = gt.microbatched_value_and_grad(mean, size, in_axes=axes)
        value, grads = ours(*args, **kwargs)
        close(gt, value, out.mean())
        close(gt, grads, rows.mean(0))


def check_per_example(gt, f, args, kwargs, axes, wanted, sizes=SIZES):
    for size in (None, *sizes[:2]):
        close(gt, gt.per_example_grad(f, in_axes=axes, chunk_size=size)(*args, **kwargs), wanted[1])


def check_vmap(gt, f, args, kwargs, axes, wanted, sizes=SIZES):
    close(gt, gt.vmap(f, in_axes=axes)(*args, **kwargs), wanted[0])


CHECKS = {
    "chunked": check_chunked,
    "microbatched_value_and_grad": check_microbatched,
    "per_example_grad": check_per_example,
    "vmap": check_vmap,
}


@pytest.fixture(params=list(CHECKS))
def check(request):
    """Return the function that checks an operator, and the name of the operator."""
    return CHECKS[request.param], request.param


def default(operator, axes):
    """Return `axes`. If `axes` is None, share w for operators that map all arguments by default."""
    return {"w": None} if axes is None and operator in ("chunked", "vmap") else axes


def sizes_of(gt):
    return SIZES if gt.__name__.endswith("torch") else (2,)


@pytest.mark.slow_at(
    ("microbatched_value_and_grad", "jax"),
    ("jax", "all by position"),
    ("per_example_grad", "jax", "one by keyword"),
    ("per_example_grad", "jax", "all but one by keyword"),
    ("per_example_grad", "jax", "in another order"),
)
@pytest.mark.sweep_at(("chunked", "jax"), ("per_example_grad", "jax", "all by position"))
@pytest.mark.parametrize("way", WAYS)
def test_examples_are_split_however_they_are_passed(gt, check, way):
    run, operator = check
    by_position, by_keyword, all_axes = WAYS[way]
    values = data(gt, {"x": X, **ARRAYS})
    f = of_rows(gt)
    args = (gt.asarray(W), *(values[k] for k in by_position))
    kwargs = {k: values[k] for k in by_keyword}
    for axes in all_axes:
        axes = default(operator, axes)
        if axes == {} and operator in ("chunked", "vmap"):
            axes = {"w": None}
        run(gt, f, args, kwargs, axes, FULL, sizes_of(gt))


@pytest.mark.slow_at(
    ("chunked", "jax"),
    ("microbatched_value_and_grad", "jax", "True"),
    ("per_example_grad", "jax", "True"),
)
@pytest.mark.sweep_at(("chunked", "jax", "True"))
@pytest.mark.parametrize("keyword", [True, False])
def test_a_dict_names_other_axes_and_what_is_shared(gt, check, keyword):
    run, _ = check
    axes = {"mask": 1, "shared": None, "w": None, "power": None}
    mask, shared = gt.asarray(MASK.T.copy()), gt.asarray(SHARED)
    f = lambda w, x, mask, shared, power: gt.xp.tanh((x * _rows(mask) + shared) @ w) ** power
    # The mask of a chunk has shape (3, rows) before the transpose; the mask of one example has
    # shape (3,).
    _rows = lambda mask: mask.T if mask.ndim == 2 else mask
    w, x = gt.asarray(W), gt.asarray(X)
    out, rows = expected(X, MASK, shared=SHARED)
    wanted = out**2, 2 * out[:, None] * rows
    if keyword:
        args, kwargs = (w,), {"shared": shared, "x": x, "power": 2, "mask": mask}
    else:
        args, kwargs = (w, x, mask, shared, 2), {}
    run(gt, f, args, kwargs, axes, wanted, sizes_of(gt))


@pytest.mark.slow_at("jax")
def test_keywords_that_go_to_no_parameter_by_name(gt):
    f = lambda **batch: batch["x"] * batch["scale"] + batch["mask"]
    given = data(gt, {"x": X, "mask": MASK, "scale": SHARED})
    close(gt, gt.chunked(f, 2, in_axes={"scale": None})(**given), X * SHARED + MASK)


@pytest.mark.sweep_at("jax")
def test_per_example_grad_to_the_examples_themselves(gt):
    f = lambda x, power=2: (x**power).sum()
    for size in (None, 1, 2):
        ours = gt.per_example_grad(f, in_axes=0, chunk_size=size)
        close(gt, ours(gt.asarray(X)), 2 * X)
        close(gt, ours(gt.asarray(X), 3), 3 * X**2)
        close(gt, ours(gt.asarray(X), power=3), 3 * X**2)
    both = gt.per_example_grad(lambda p: (p["a"] * p["b"]).sum(), in_axes=0)
    found = both(data(gt, {"a": X, "b": MASK}))
    close(gt, found["a"], MASK)
    close(gt, found["b"], X)


@pytest.mark.sweep_at("jax")
def test_a_keyword_weight_is_given_to_the_function_of_weights(gt):
    mean = lambda w, x, *, n: (gt.xp.tanh(x @ w) * n).sum() / n.sum()
    n = np.array([3.0, 1.0, 0.0, 2.0, 4.0])
    out, rows = expected(X)
    for weights in (lambda w, x, n: n.sum(), lambda w, x, **more: more["n"].sum(), n):
        value, grads = gt.microbatched_value_and_grad(mean, 2, weights=weights)(
            gt.asarray(W), gt.asarray(X), n=gt.asarray(n)
        )
        close(gt, value, (out * n).sum() / n.sum())
        close(gt, grads, n @ rows / n.sum())
    power = gt.microbatched_value_and_grad(
        lambda w, x, power: (gt.xp.tanh(x @ w) ** power).mean(), 2, weights=lambda w, x: x.shape[0]
    )
    close(gt, power(gt.asarray(W), gt.asarray(X), power=2)[0], (out**2).mean())


WRONG = [
    (
        {"shift": {"b": SHARED}},
        {},
        r"the batch sizes differ: 5 in argument 1, 3 in keyword argument shift\['b'\]\. Set .* "
        "None shares an argument",
    ),
    ({"mask": MASK[:, 0]}, {"mask": 1}, r"keyword argument mask of shape \(5,\) has no axis 1"),
    (
        {"mask": MASK},
        {"maks": None},
        r"in_axes names 'maks', which is neither a parameter of <lambda>",
    ),
    ({"scale": np.array(2.0)}, {"scale": 0}, r"keyword argument scale of shape \(\) has no axis 0"),
    ({"mask": MASK}, {"mask": "x"}, r"keyword argument mask is 'x'; expected an integer"),
    ({"names": ["a", "b"]}, {}, "2 in the list keyword argument names"),
]


@pytest.mark.parametrize(("kwargs", "axes", "words"), WRONG, ids=lambda v: str(v)[:20])
def test_what_does_not_fit_is_refused_by_name(gt, check, kwargs, axes, words):
    operator = check[1]
    if operator in ("per_example_grad", "vmap") and "names" in kwargs:
        pytest.skip(f"{operator} does not accept lists of examples")
    f = lambda w, x, shift=None, mask=None, scale=None, names=None: (x @ w).sum()
    size = () if operator in ("per_example_grad", "vmap") else (2,)
    ours = getattr(gt, operator)(f, *size, in_axes={"w": None, **axes})
    with pytest.raises(GradtoolsError, match=f"^{operator}: .*{words}"):
        ours(gt.asarray(W), gt.asarray(X), **data(gt, kwargs))


def test_a_differentiated_argument_that_is_split_by_name_is_refused(gt):
    ours = gt.microbatched_value_and_grad(lambda w, x: (x @ w).mean(), 2, in_axes={"w": 0})
    with pytest.raises(GradtoolsError, match="argument 0 is differentiated, so all chunks share"):
        ours(gt.asarray(W), gt.asarray(X))


def equinox_layer(gt):
    return pytest.importorskip("equinox").nn.Linear(3, 1, key=gt.random_key(0))


def nnx_layer(gt):
    nnx = pytest.importorskip("flax.nnx")
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def torch_layer(gt):
    return pytest.importorskip("torch").nn.Linear(3, 1)


# LAYERS contains the backend, a function that returns a linear layer, and the names of the layer's
# parameters and of its argument.
LAYERS = {
    "torch.nn": ("torch", torch_layer, ("weight", "bias", "input")),
    "equinox": ("jax", equinox_layer, ("weight", "bias", "x")),
    "flax.nnx": ("jax", nnx_layer, ("kernel", "bias", "inputs")),
}
HOLDERS = {
    "alone": (lambda gt, layer: layer, lambda module: module),
    "in a dict": (lambda gt, layer: {"layer": layer}, lambda module: module["layer"]),
    "in a list": (lambda gt, layer: [layer], lambda module: module[0]),
    "checkpointed": (lambda gt, layer: gt.checkpoint(layer), lambda module: module),
}


def layer_case(kind):
    """Return the namespace of a layer's backend, the layer, and a reference in NumPy.

    The reference is the function `(x, shift) -> (squared errors, gradients)`, with one entry per
    row of x; a gradient is the derivative with respect to the weights and then the bias.
    """
    backend, make, (weight, bias, argument) = LAYERS[kind]
    gt = pytest.importorskip(f"gradtools.{backend}")
    layer = make(gt)
    w, b = [gt.to_numpy(getattr(layer, name)[...]).reshape(-1) for name in (weight, bias)]

    def reference(x, shift):
        error = x @ w + b - shift
        return error**2, 2 * error[:, None] * np.c_[x, np.ones(len(x))]

    return gt, layer, reference, argument


def rows_of(gt, grads, count):
    """Return gradients with respect to a layer as a NumPy array of shape (count, 4)."""
    if gt.__name__.endswith("jax"):
        leaves = pytest.importorskip("jax").tree.leaves(grads)
    else:
        leaves = pytest.importorskip("torch").utils._pytree.tree_leaves(grads)
    flat = [gt.to_numpy(x).reshape(count, -1) for x in leaves]
    return np.concatenate(sorted(flat, key=lambda x: -x.shape[1]), 1)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("operator", CHECKS)
def test_a_dict_names_the_arguments_of_a_function_of_modules(operator, kind, holder):
    gt, layer, reference, _ = layer_case(kind)
    held, whole = HOLDERS[holder][0](gt, layer), HOLDERS[holder][1]
    x, shift = X.astype(np.float32), np.float32([0.5])
    values, rows = reference(x, shift)
    applied = gt.vmap if kind == "equinox" else lambda layer: layer
    of_rows = lambda module, x, shift: (applied(whole(module))(x)[:, 0] - shift) ** 2
    of_row = lambda module, x, shift: ((whole(module)(x) - shift) ** 2).sum()
    given = held, gt.asarray(x), gt.asarray(shift)
    if operator == "per_example_grad":
        for size in (None, 1):
            grads = gt.per_example_grad(of_row, in_axes={"shift": None}, chunk_size=size)(*given)
            np.testing.assert_allclose(rows_of(gt, grads, N), rows, rtol=1e-4, atol=1e-5)
    elif operator == "microbatched_value_and_grad":
        mean = lambda module, x, shift: of_rows(module, x, shift).mean()
        value, grads = gt.microbatched_value_and_grad(mean, 2, in_axes={"shift": None})(*given)
        np.testing.assert_allclose(gt.to_numpy(value), values.mean(), rtol=1e-5)
        np.testing.assert_allclose(rows_of(gt, grads, 1)[0], rows.mean(0), rtol=1e-4, atol=1e-5)
    else:
        axes = {"shift": None, "module": None}
        run = gt.vmap(of_row, axes) if operator == "vmap" else gt.chunked(of_rows, 2, axes)
        np.testing.assert_allclose(gt.to_numpy(run(*given)), values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_module_that_is_not_differentiated_leaves_the_names(kind):
    gt, layer, reference, _ = layer_case(kind)
    x, shift = X.astype(np.float32), np.float32([0.5])
    of_row = lambda shift, module, x: ((module(x) - shift) ** 2).sum()
    ours = gt.per_example_grad(of_row, in_axes={"module": None, "x": 0})
    found = gt.to_numpy(ours(gt.asarray(shift), layer, gt.asarray(x)))
    wanted = -reference(x, shift)[1][:, 3:]  # minus the derivative with respect to the bias
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", ["checkpoint", "frozen"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_dict_names_the_arguments_of_a_transformed_module(kind, transform):
    gt, layer, reference, argument = layer_case(kind)
    x = X.astype(np.float32)
    ours = gt.vmap(getattr(gt, transform)(layer), in_axes={argument: 1})
    found = gt.to_numpy(ours(gt.asarray(x.T.copy())))[:, 0]
    np.testing.assert_allclose(found**2, reference(x, 0)[0], rtol=1e-4, atol=1e-5)
