"""Errors of f that say how an operator calls f."""

import numpy as np
import pytest

from gradtools import GradtoolsError


def notes(run):
    with pytest.raises((TypeError, ValueError, IndexError)) as raised:
        run()
    return " ".join(getattr(raised.value, "__notes__", []))


def test_per_example_grad_says_that_f_sees_one_example(gt):
    w, x = gt.asarray(np.ones(3)), gt.asarray(np.ones((4, 3)))

    def f(w, x):
        if x.ndim != 2:
            raise ValueError("expected 2D input")
        return (x @ w).sum()

    assert "f sees one example" in notes(lambda: gt.per_example_grad(f)(w, x))


def test_chunked_says_that_f_gets_a_list(gt):
    images = [gt.asarray(np.ones((3, 2 + k))) for k in range(3)]

    def f(x):
        if isinstance(x, list):
            raise TypeError("conv2d() received a list")
        return x.sum()

    text = notes(lambda: gt.chunked(f, 1)(images))
    assert "[f(x) for x in xs]" in text
    joined = gt.chunked(lambda xs: gt.xp.stack([f(x) for x in xs]), 1)(images)
    np.testing.assert_allclose(gt.to_numpy(joined), [6, 9, 12])


def test_aux_of_each_example_is_refused_where_the_last_chunk_is_short(gt):
    w, x = gt.asarray(np.ones(3)), gt.asarray(np.ones((10, 3)))
    step = gt.microbatched_value_and_grad(
        lambda w, x: (((x @ w) ** 2).mean(), {"out": x @ w}), 4, in_axes=(None, 0), has_aux=True
    )
    with pytest.raises(GradtoolsError, match=r"aux\['out'\] has shape \(4,\) in one chunk and"):
        step(w, x)


def test_apply_of_a_model_shows_how_it_is_called(gt, backend_name):
    if backend_name == "torch":
        import torch

        model = torch.nn.Linear(3, 2)
    else:
        import jax
        from flax import nnx

        model = nnx.Linear(3, 2, rngs=nnx.Rngs(jax.random.key(0)))
    apply, params, _ = gt.make_functional(model)
    assert repr(apply) == "<apply, called with (params, state, *args, key=None, **kwargs)>"
    with pytest.raises(TypeError, match=r"apply\(\) missing 1 required positional argument"):
        apply(params)
