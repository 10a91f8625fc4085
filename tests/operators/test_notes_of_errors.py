"""Errors of f get a note that explains how the operator calls f."""

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.bad_inputs import layer


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

    assert "f receives one example, without the batch axis; x[None] adds it" in notes(
        lambda: gt.per_example_grad(f)(w, x)
    )


def test_chunks_say_what_f_was_called_with(gt):
    images = [gt.asarray(np.ones((3, 2 + k))) for k in range(3)]

    def f(x):
        raise TypeError("conv2d() received a list")

    assert "called with one chunk, (a list of 1)." in notes(lambda: gt.chunked(f, 1)(images))
    mean = lambda w, x: f(x)
    step = gt.microbatched_value_and_grad(mean, 2)
    text = notes(lambda: step(gt.asarray(np.ones((4, 3))), gt.asarray(np.ones(3))))
    assert "(an array of shape (4, 3) and dtype float64, an array of shape (2,) and" in text
    assert "All chunks share argument 0 (in_axes=None) and every argument in argnums." in text
    assert "share" not in notes(lambda: gt.chunked(f, 1)(images))


def test_mixed_partial_says_how_its_functions_are_called(gt):
    x = gt.asarray(np.ones(3))
    swapped = lambda: gt.mixed_partial(lambda z: z, lambda y, g: (y * g).sum(), x, x, x)
    assert "mixed_partial calls G(z) and f(y, G(z))" in notes(swapped)


def test_edits_say_how_their_functions_are_called(gt):
    x = gt.asarray(np.ones(3))
    of_two = lambda x, g: g
    edited = lambda x: gt.xp.sum(gt.transform_gradient(x, of_two))
    assert "transform_gradient calls fn(gradient)" in notes(lambda: gt.grad(edited)(x))
    edited = lambda x: gt.xp.sum(gt.transform_gradient((x, x), of_two)[0])
    assert "transform_gradient calls fn(gradient)" in notes(lambda: gt.grad(edited)(x))
    through = gt.straight_through(gt.xp.round, of_two)
    assert "straight_through calls the surrogate with f's arguments" in notes(lambda: through(x))


def test_a_kernel_that_writes_its_argument_hears_that_it_is_read_only(gt):
    kernel = gt.host_function(lambda x: (x.sort(), x)[1])
    assert "the arguments are read-only; copy them" in notes(lambda: kernel(gt.asarray(np.ones(3))))


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
    assert type(apply).__name__ == "PureFunction"
    with pytest.raises(TypeError, match=r"apply\(\) missing 1 required positional argument"):
        apply(params)


def test_apply_says_how_a_key_is_passed(gt):
    apply, params, state = gt.make_functional(layer(gt))
    x = gt.asarray(np.ones(2, np.float32))
    with pytest.raises((TypeError, ValueError)) as raised:
        apply(params, state, gt.random_key(0), x, x)
    text = " ".join(getattr(raised.value, "__notes__", []))
    assert "apply(params, state, *args, key=None) calls the module with args; pass a" in text


def test_the_layers_of_jax_are_in_the_namespaces_of_its_libraries(gt, backend_name):
    if backend_name == "jax":
        with pytest.raises(AttributeError, match=r"gradtools\.jax\.linen"):
            print(gt.nn)
