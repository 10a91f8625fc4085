"""A rule of a wrong structure, shape or dtype, in every way.

The author gets what the rule gives as it stands, the error of the author's own code, or a refusal
in plain words; never an error from within gradtools.
"""

from __future__ import annotations

import traceback
import warnings

import numpy as np
import pytest

from gradtools import GradtoolsError


def _half(gt, y):
    return y.float() if gt.xp.__name__.endswith("torch") else y.astype("float16")


def _doubled(gt, y):
    return gt.xp.stack([y, y]).reshape(-1)


# By name: what comes in the place of what is right.
WRONG = {
    "nothing wrong": lambda gt, y: y,
    "a sum": lambda gt, y: y.sum(),
    "longer": _doubled,
    "an axis in front": lambda gt, y: y[None],
    "a tuple": lambda gt, y: (y,),
    "twice": lambda gt, y: (y, y),
    "a dict": lambda gt, y: {"a": y},
    "None": lambda gt, y: None,
    "another dtype": _half,
    "integers": lambda gt, y: (
        gt.asarray(gt.to_numpy(gt.stop_gradient(y)).astype(np.int32))
        if type(y).__module__ == "torch"
        else y.astype(int)
    ),
    "text": lambda gt, y: "no",
    "a number": lambda gt, y: 1.0,
    "an empty tuple": lambda gt, y: (),
}


def _push(gt, x, t):
    return gt.xp.cos(x) * t


# By name: where in the rule.
PLACES = {
    "fwd's value": lambda gt, f, sin, wrong: f.defvjp(
        lambda x: (wrong(gt, sin(x)), x), lambda x, c: (_push(gt, x, c),)
    ),
    "fwd's pair": lambda gt, f, sin, wrong: f.defvjp(
        lambda x: wrong(gt, sin(x)), lambda x, c: (_push(gt, x, c),)
    ),
    "bwd's entry": lambda gt, f, sin, wrong: f.defvjp(
        lambda x: (sin(x), x), lambda x, c: (wrong(gt, _push(gt, x, c)),)
    ),
    "bwd's tuple": lambda gt, f, sin, wrong: f.defvjp(
        lambda x: (sin(x), x), lambda x, c: wrong(gt, _push(gt, x, c))
    ),
    "the forward rule's value": lambda gt, f, sin, wrong: f.defjvp(
        lambda p, t: (wrong(gt, sin(p[0])), _push(gt, p[0], t[0]))
    ),
    "the forward rule's tangent": lambda gt, f, sin, wrong: f.defjvp(
        lambda p, t: (sin(p[0]), wrong(gt, _push(gt, p[0], t[0])))
    ),
    "the forward rule's pair": lambda gt, f, sin, wrong: f.defjvp(
        lambda p, t: wrong(gt, _push(gt, p[0], t[0]))
    ),
}


def _total(tree):
    if isinstance(tree, dict | list | tuple):
        parts = tree.values() if isinstance(tree, dict) else tree
        return sum(map(_total, parts), 0.0)
    return tree.sum() if hasattr(tree, "sum") else 0.0


def _loss(gt, f):
    return lambda x: _total(f(x)) + 0 * x.sum()


def _linearized(gt, f, x):
    _, push = gt.linearize(_loss(gt, f), x)
    return push(x)


WAYS = {
    "value": lambda gt, f, x: f(x),
    "grad": lambda gt, f, x: gt.grad(_loss(gt, f))(x),
    "jvp": lambda gt, f, x: gt.jvp(_loss(gt, f), (x,), (x,)),
    "linearize": _linearized,
    "hvp": lambda gt, f, x: gt.hvp(_loss(gt, f), (x,), (x,)),
    "vmap of grad": lambda gt, f, x: gt.vmap(gt.grad(_loss(gt, f)))(gt.xp.stack([x, x])),
}


def _of_the_author(error):
    """Whether it came out of the functions in this file, the last line of ours or theirs."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [name for name in names if "gradtools" in name or name == __file__]
    return ours[-1:] == [__file__]


def _outcome(gt, place, wrong, way):
    f = gt.custom_rule(gt.xp.sin)
    PLACES[place](gt, f, gt.xp.sin, WRONG[wrong])
    x = gt.asarray(np.float32([0.25, 0.5, 0.75]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            try:
                WAYS[way](gt, f, x)
            except GradtoolsError:
                return "refused"
            except Exception as error:
                if not _of_the_author(error):
                    raise
                return "the author's"
    return "as it stands"


@pytest.mark.slow_at(
    "fwd's value",
    "bwd's entry",
    "bwd's tuple",
    "the forward rule's value",
    "the forward rule's tangent",
    "the forward rule's pair",
)
@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("place", PLACES)
def test_no_error_comes_from_within(gt, place):
    for wrong in WRONG:
        for way in WAYS:
            found = _outcome(gt, place, wrong, way)
            if wrong == "nothing wrong" and "pair" not in place and "tuple" not in place:
                assert found == "as it stands", (wrong, way)
