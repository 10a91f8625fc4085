"""Tests a minimal third backend, which uses the default methods of `Backend`.

`hips_backend.py` implements the abstract members and a function with a custom pullback; all other
methods are the defaults in `gradtools/backend.py`. The PyTorch backend computes the expected values
with the same test functions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gradtools.torch as of_torch
from gradtools import GradtoolsError
from gradtools.backend import Backend

hips = pytest.importorskip("tests.support.hips_backend", reason="HIPS autograd is not installed")

TESTS = Path(__file__).parents[1]
X = np.array([0.5, -1.5, 2.0])
Z = X + 1j * X[::-1]


def _rule(gt, which):
    @gt.custom_rule
    def cube(x, y):
        return x**3 * y, x + y

    if which == "reverse":
        cube.defvjp(
            lambda x, y: (cube(x, y), (x, y, x**2)),
            lambda saved, cts: (
                3 * saved[2] * saved[1] * cts[0] + cts[1],
                saved[0] ** 3 * cts[0] + cts[1],
            ),
        )
    else:
        cube.defjvp(
            lambda xs, ts: (
                cube(*xs),
                (3 * xs[0] ** 2 * xs[1] * ts[0] + xs[0] ** 3 * ts[1], ts[0] + ts[1]),
            )
        )
    return lambda x: (cube(x, 2.0 * x)[0] * cube(x, x)[1]).sum()


def _edits(gt):
    edits = {
        "reverse_gradient": gt.reverse_gradient,
        "scale_gradient": lambda x: gt.scale_gradient(x, 0.3),
        "stop_gradient": lambda x: gt.stop_gradient(x) * x,
        "clip_gradient": lambda x: gt.clip_gradient(x, max_norm=0.5),
        "transform_gradient": lambda x: gt.transform_gradient(x, lambda c: c * c),
        "replace_gradient": lambda x: gt.replace_gradient(x, x * x),
        "straight_through": gt.straight_through(lambda x: gt.xp.sign(x) * x, lambda x: x**2),
    }
    return {name: lambda x, f=f: (f(x) ** 2).sum() for name, f in edits.items()}


def _derivatives(gt):
    loss = lambda p: (gt.xp.sin(p["w"]) * p["b"][0] * p["w"]).sum()
    tree = lambda x: {"b": [x * 2, None], "w": x}
    vector = lambda x: gt.xp.exp(x) * x[0]
    scalar = lambda x: (x**3).sum() * x[0]
    return {
        "grad": lambda x: gt.grad(loss)(tree(x)),
        "value_and_grad": lambda x: gt.value_and_grad(loss)(tree(x)),
        "grad of grad": lambda x: gt.grad(lambda y: (gt.grad(scalar)(y) ** 2).sum())(x),
        "third order": lambda x: gt.grad(lambda y: gt.hvp(scalar, (y,), (y,))[1][0].sum())(x),
        "vjp": lambda x: gt.vjp(vector, x)[1](x),
        "jvp": lambda x: gt.jvp(vector, (x,), (x,)),
        "linearize": lambda x: gt.linearize(vector, x)[1](x),
        "hvp": lambda x: gt.hvp(scalar, (x,), (x,)),
        "hvp: forward": lambda x: gt.hvp(scalar, (x,), (x,), mode="forward_over_reverse"),
        "jacobian": lambda x: gt.jacobian(vector)(x),
        "jacobian: forward": lambda x: gt.jacobian(vector, mode="forward")(x),
        "hessian": lambda x: gt.hessian(scalar)(x),
        "per_example_grad": lambda x: gt.per_example_grad(lambda w, x: (w * x**2).sum())(x, x),
        "minimax": lambda x: gt.minimax_value_and_grad(lambda a, b: (a * b**2).sum(), 0, 1)(x, x),
        "mixed_partial": lambda x: gt.mixed_partial(
            lambda y, g: (y**3 * g).sum(), lambda z: z**2, x, x, x
        ),
        "implicit_solution": lambda x: gt.grad(
            lambda x: gt.implicit_solution(
                lambda z, x: z**3 - x, lambda x: x ** (1 / 3), lambda A, b: b / A(b) * b
            )(x).sum()
        )(x * x + 1),
        "retained_gradients": lambda x: gt.retained_gradients(
            lambda x: (gt.retain_gradient(gt.retain_gradient(x**2, "a") * x, "a") ** 2).sum()
        )(x),
        "complex": lambda x: gt.grad(lambda z: (gt.xp.abs(z * z) ** 2).sum())(gt.asarray(Z)),
        "complex: pullback": lambda x: gt.vjp(lambda z: z * z * 1j, gt.asarray(Z))[1](
            gt.asarray(Z)
        ),
    }


def _cases(gt):
    found = _derivatives(gt)
    for name, f in {
        **_edits(gt),
        "rule: reverse": _rule(gt, "reverse"),
        "rule: forward": _rule(gt, "forward"),
    }.items():
        found[name] = gt.value_and_grad(f)
        found[f"{name}: hvp"] = lambda x, f=f: gt.hvp(f, (x,), (gt.asarray(X[::-1].copy()),))
    mean = lambda w, x: (w * x**2).sum() / len(x)
    found["microbatched_value_and_grad"] = lambda x: gt.microbatched_value_and_grad(mean, 2)(
        x[:1], x
    )
    return found


NAMES = list(_cases(of_torch))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_wing_gives_the_defaults_give(name):
    ours, theirs = (
        [np.asarray(gt.to_numpy(x)) for x in gt._api._backend.flatten(found)[0]]
        for gt in (hips, of_torch)
        for found in [_cases(gt)[name](gt.asarray(X))]
    )
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


REFUSED = {
    "why_zero": lambda gt, x: gt.why_zero(lambda x: x.sum(), x),
    "vmap": lambda gt, x: gt.vmap(lambda x: x)(x),
    "all_gather": lambda gt, x: gt.all_gather(x),
    "host_function": lambda gt, x: gt.host_function(lambda x: x)(x),
    "chunked": lambda gt, x: gt.chunked(lambda x: x, 1)(x),
    "frozen": lambda gt, x: gt.frozen(lambda x: x)(x),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_has_no_default_is_refused_by_its_name(name):
    with pytest.raises(GradtoolsError, match=f"^{name}: the backend '{hips.__name__}' does not"):
        REFUSED[name](hips, X)


@pytest.mark.parametrize("name", ["clip_gradient", "replace_gradient"])
def test_forward_mode_of_what_is_not_linear_is_refused_and_no_number(name):
    f = _edits(hips)[name]
    with pytest.raises(GradtoolsError, match=r"jvp: f contains .*, which has a reverse rule only"):
        hips.jvp(f, (X,), (X,))
    assert hips.grad(f)(X).shape == X.shape  # the error must not change global state


def test_it_gives_little():
    text = (TESTS / "support" / "hips_backend.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200


def test_what_a_backend_must_give_is_short():
    """`Backend` has exactly the abstract members that the documentation lists."""
    trees, arrays = (
        {"flatten", "unflatten", "leaf_paths"},
        {"xp", "is_array", "asarray", "to_numpy"},
    )
    assert Backend.__abstractmethods__ == {*trees, *arrays, "stop_gradient", "vjp"}
    members = [name for name in vars(hips.HipsBackend) if not name.startswith("_")]
    assert set(members) == {*Backend.__abstractmethods__, "name", "with_pullback"}
