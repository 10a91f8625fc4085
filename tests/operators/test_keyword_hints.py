"""A keyword of another library raises an error that names gradtools' keyword in one sentence."""

from __future__ import annotations

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
    # Python raises a TypeError for an unknown keyword, too
    assert isinstance(raised.value, TypeError)


def test_keywords_of_f_itself_are_not_looked_at(gt):
    """f itself may have a parameter with the name of such a keyword, for example holomorphic."""
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
    ],
)
def test_a_name_of_another_tool_is_answered(gt, name, instead):
    with pytest.raises(AttributeError) as raised:
        getattr(gt, name)
    assert instead in str(raised.value)
    assert raised.value.name == name
    assert raised.value.obj is gt or raised.value.obj.__name__ == gt.__name__
