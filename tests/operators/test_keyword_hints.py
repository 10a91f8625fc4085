"""A keyword of another library raises an error that names gradtools' keyword in one sentence."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from gradtools import GradtoolsError

HINTS = {
    ("custom_rule", "nondiff_argnums", (1,)): "static_argnames=",
    ("grad", "argnames", "x"): "argnums=0",
    ("grad", "holomorphic", True): "complex arguments",
    ("grad", "create_graph", True): "derivatives nest",
    ("grad", "allow_unused", True): 'disconnected_inputs="zeros"',
    ("checkpoint", "policy", None): "jax.checkpoint(f, policy=...)",
    ("vmap", "in_dims", 0): "in_axes=",
    ("vmap", "axis_name", "i"): "jax.vmap(f, axis_name=...)",
    ("chunked", "batch_size", 2): "chunk_size=",
    ("host_function", "result_shape_dtypes", None): "out=ArraySpec",
}


@pytest.mark.parametrize(("name", "keyword", "value"), HINTS)
def test_a_keyword_of_another_tool_is_answered(gt, name, keyword, value):
    with pytest.raises(GradtoolsError) as raised:
        getattr(gt, name)(lambda x: x, **{keyword: value})
    said = str(raised.value)
    assert said.startswith(f"{name}: there is no argument {keyword}=. Instead, ")
    assert HINTS[name, keyword, value] in said
    # Python also raises a TypeError for an unknown keyword
    assert isinstance(raised.value, TypeError)


def decorated(*options):
    return f"@functools.partial({', '.join(options)})."


DECORATORS = {
    "checkpoint": ({}, "@checkpoint without parentheses, or", ("checkpoint", "verify=...")),
    "frozen": ({"verify": True}, "@frozen without parentheses, or", ("frozen", "verify=...")),
    "straight_through": (
        {"surrogate": abs},
        "@straight_through without parentheses, or with options ",
        ("straight_through", "surrogate=..."),
    ),
    "grad": ({"argnums": 1}, "@grad without parentheses, or", ("grad", "argnums=...")),
    "compile": ({}, "@compile without parentheses, or", ("compile", "...")),
    "chunked": ({"chunk_size": 2}, " write @functools", ("chunked", "chunk_size=...")),
    "minimax_value_and_grad": (
        {"minimize": 0, "maximize": 1},
        " write @functools",
        ("minimax_value_and_grad", "minimize=...", "maximize=..."),
    ),
}


@pytest.mark.parametrize("name", DECORATORS)
def test_a_call_without_f_is_told_how_to_decorate(gt, name):
    options, plain, call = DECORATORS[name]
    with pytest.raises(GradtoolsError, match=f"^{name}: missing .* To decorate a function, ") as e:
        getattr(gt, name)(**options)
    assert plain in str(e.value)
    assert str(e.value).endswith(decorated(*call))


def test_the_decorators_of_the_texts_work(gt):
    @functools.partial(gt.chunked, chunk_size=2)
    @gt.checkpoint
    def double(x):
        return 2 * x

    @functools.partial(gt.minimax_value_and_grad, minimize=0, maximize=1)
    def game(x, y):
        return (x * y).sum()

    x = gt.asarray(np.float32([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(gt.to_numpy(double(x)), [2.0, 4.0, 6.0])
    np.testing.assert_array_equal(gt.to_numpy(game(x, 2 * x)[1][1]), [-1.0, -2.0, -3.0])


def test_operators_without_a_result_to_decorate_name_only_their_signature(gt):
    x = gt.asarray(np.float32(1.0))
    for call in (
        lambda: gt.vjp(),
        lambda: gt.jvp(primals=(x,), tangents=(x,)),
        lambda: gt.why_zero(),
        lambda: gt.grad(lambda x: x, 0, False, "raise", "auto", 1),
        lambda: gt.clip_gradient(max_norm=1.0),
    ):
        with pytest.raises(GradtoolsError, match="Expected") as e:
            call()
        assert "decorate" not in str(e.value)


def test_keywords_of_f_itself_are_not_looked_at(gt):
    """f may have a parameter with the name of another library's keyword, such as holomorphic."""
    f = lambda x, holomorphic, policy=1: holomorphic * policy * x**2
    x = gt.asarray(np.float32(3.0))
    assert float(gt.grad(f)(x, holomorphic=2.0)) == 12
    assert float(gt.value_and_grad(f)(x, holomorphic=1.0, policy=2.0)[1]) == 12


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("minimax", "minimax_value_and_grad"),
        ("jacrev", 'jacobian(f, mode="reverse")'),
        ("grad_and_value", "value_and_grad(f)"),
        ("to_jax", "gradtools.bridge.to_jax(f)"),
        ("to_torch", "gradtools.bridge.to_torch(f)"),
    ],
)
def test_a_name_of_another_tool_is_answered(gt, name, instead):
    with pytest.raises(AttributeError) as raised:
        getattr(gt, name)
    assert instead in str(raised.value)
    assert raised.value.name == name
    assert raised.value.obj is gt or raised.value.obj.__name__ == gt.__name__
