"""Each bad call of `bad_inputs.py` raises the stored error text and changes no global state."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from types import CodeType

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.bad_inputs import (
    BACKENDS,
    BAD,
    NATIVE,
    ONLY,
    expected,
    read,
    without_what_changes,
)
from tests.support.numpy_trees import lift
from tests.support.state_of_process import changes, everything

TEXTS = read()


def test_the_table_holds_calls_of_every_operator(gt):
    assert len(BAD) > 120
    called = {name for call in BAD.values() for name in names_in(call.__code__)}
    assert set(gt.__all__) - called == {"is_recomputing"}  # is_recomputing takes no arguments


def names_in(code: CodeType) -> set[str]:
    inside = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {*code.co_names, *(name for names in inside for name in names)}


def test_the_texts_are_those_of_the_table():
    known = [*BAD, *(f"{name} ({backend})" for name in BAD for backend in BACKENDS)]
    assert set(TEXTS) <= set(known)


@pytest.mark.slow_at(
    ("jax", "chunked, another structure of the last chunk"),
)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_with_its_text(name, gt, backend_name):
    if ONLY.get(name, backend_name) != backend_name:
        pytest.skip(f"the call raises an error only in {ONLY[name]}")

    def array(x: np.ndarray) -> object:
        return lift(backend_name, x)

    array(np.ones(1))
    # the import of these modules draws random numbers and adds warning filters
    for library in ("flax.linen", "scipy.sparse"):
        with suppress(ImportError):
            import_module(library)
    before = everything()
    with pytest.raises(Exception) as caught:
        BAD[name](gt, array)
    assert changes(before, everything()) == []
    assert without_what_changes(str(caught.value)) == expected(TEXTS, name, backend_name)
    assert isinstance(caught.value, GradtoolsError) != (name in NATIVE)


def test_an_error_of_f_reaches_the_user_as_it_is(gt, backend_name):
    def f(x):
        raise KeyError("mine")

    x = lift(backend_name, np.array([1.0, 2.0]))
    for run in (
        lambda: gt.grad(f)(x),
        lambda: gt.vjp(f, x),
        lambda: gt.jvp(f, (x,), (x,)),
        lambda: gt.linearize(f, x),
        lambda: gt.hvp(f, (x,), (x,)),
        lambda: gt.jacobian(f)(x),
        lambda: gt.hessian(f)(x),
    ):
        with pytest.raises(KeyError, match="mine"):
            run()


def test_an_integer_leaf_in_another_argument_is_welcome(gt, backend_name):
    x, n = lift(backend_name, (np.array([1.0, 2.0]), np.array([1, 2])))
    assert gt.grad(lambda x, p: gt.xp.sum(x * p["n"]))(x, {"n": n, "s": "name"}) is not None


def test_the_same_bad_call_is_refused_under_vmap(gt, backend_name):
    x = lift(backend_name, np.ones((3, 2)))
    with pytest.raises(GradtoolsError, match="f must return one real number"):
        gt.vmap(gt.grad(lambda x: x * x))(x)
    with pytest.raises(GradtoolsError, match="Return a floating-point number"):
        gt.vmap(gt.grad(lambda x: gt.xp.argmax(x)))(x)
