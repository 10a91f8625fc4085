"""Random compositions of our operators and the frameworks' own, held against dual numbers.

GRADTOOLS_TEST_EXAMPLES=5000 draws as many programs, other ones each time.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import hypothesis
import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.testing import strategies
from gradtools.testing.strategies_limits import LIMITS, limit_of

MORE = int(os.environ.get("GRADTOOLS_TEST_EXAMPLES", "0"))
EXAMPLES = {"torch": MORE or 400, "jax": MORE or 200}
pytestmark = pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")


def drawn(strategy, examples, holds):
    """Every drawn program through `holds`; the same ones each time, unless more are asked for."""
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=not MORE,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.given(strategy)(lambda program: holds(program)))()


def tried(program, backend, seen):
    """Counts what occurs; a refusal must be one that a framework's limit explains."""
    seen["programs"] += 1
    seen.update(program.operators())
    try:
        program.check(backend)
    except GradtoolsError as error:
        limit = limit_of(program, str(error).partition("\n\n")[0], backend)
        if limit is None:
            raise
        seen["refused"] += 1


def test_a_random_composition_has_the_numbers_of_the_reference(gt, backend_name):
    seen = Counter()
    slow = {"compiled"} if backend_name == "torch" else set()  # a compilation takes seconds there
    operators = set(strategies.OPERATORS) - slow
    everything = strategies.compositions(operators=operators)
    drawn(everything, EXAMPLES[backend_name], lambda program: tried(program, backend_name, seen))
    assert seen["programs"] >= EXAMPLES[backend_name] // 2
    assert seen["refused"] < seen["programs"] / 10
    assert operators <= set(seen), "an operator never came"


def test_a_compiled_composition_has_the_numbers_of_the_reference(gt, backend_name):
    seen = Counter()
    strategy = strategies.compositions(compiled=True, depth=2, lines=2)
    drawn(strategy, MORE // 10 or 6, lambda program: tried(program, backend_name, seen))
    assert seen["refused"] < seen["programs"]


# --- what a failure looks like -----------------------------------------------------------


def caught(backend, monkeypatch, owner, name, mutant, **limits):
    """The text of the error that a planted defect leads to, shrunk."""
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(GradtoolsError, match="This program") as found:
        drawn(
            strategies.compositions(**limits),
            300,
            lambda program: tried(program, backend, Counter()),
        )
    return str(found.value)


def test_a_planted_defect_shrinks_to_a_short_program_that_runs(gt, backend_name, monkeypatch):
    plain = gt.grad
    mutant = lambda f, k=0, **more: lambda *xs: 2 * plain(f, k, **more)(*xs)
    limits = {"operators": ["gt.grad"], "order": 1, "edits": False}
    said = caught(backend_name, monkeypatch, gt, "grad", mutant, **limits)
    summary, _, text = said.partition("\n\n")
    assert "is off by" in summary
    body = text[text.index("def program") : text.index("inputs =")].strip().splitlines()
    assert "gt.grad(" in text and len(body) <= 9, text
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        exec(compile(text, "<printed>", "exec"), {})
    monkeypatch.undo()
    exec(compile(text, "<printed>", "exec"), {})


def test_defects_of_operators_are_caught(gt, backend_name, monkeypatch):
    hvp, chunked, vjp = gt.hvp, gt.chunked, gt.vjp
    lost = lambda f, x, t, **more: (lambda found: (found[0], found[0]))(hvp(f, x, t, **more))
    first_row = lambda f, n, in_axes=0: (
        lambda x, *rest: chunked(f, n, in_axes)(x * 0 + x[:1], *rest)
    )
    mutants = {
        "hvp": lost,
        "chunked": first_row,
        "vjp": lambda f, *xs: (None, lambda c: vjp(f, *xs)[1](c * 0 + 1)),
    }
    for name, mutant in mutants.items():
        with monkeypatch.context() as patch:
            said = caught(
                backend_name, patch, gt, name, mutant, operators=[f"gt.{name}"], edits=False
            )
        assert f"gt.{name}(" in said


# --- what was found by drawing many ----------------------------------------------------------


def compiled(gt, f):
    return gt.compile(f, **({"backend": "aot_eager"} if gt.__name__.endswith("torch") else {}))


def array(gt, *shape):
    return gt.asarray(np.sin(1.0 + np.arange(float(np.prod(shape)))).reshape(shape))


@pytest.mark.parametrize("kind", ["vjp", "jvp", "host"])
def test_a_compiled_rule_takes_another_shape(gt, kind):
    """PyTorch's compiler keeps lengths open at the second shape; they have no hash."""
    cube = (
        gt.host_function(lambda x: x**3) if kind == "host" else gt.custom_rule(lambda x: x * x * x)
    )
    if kind == "jvp":
        cube.defjvp(lambda xs, ts: (cube(*xs), 3 * xs[0] ** 2 * ts[0]))
    else:
        cube.defvjp(lambda x: (cube(x), x), lambda x, c: (3 * x**2 * c,))
    f = compiled(gt, lambda x: gt.grad(lambda x: gt.xp.sum(cube(x)))(x))
    for length in (3, 2, 4):
        x = array(gt, length)
        np.testing.assert_allclose(gt.to_numpy(f(x)), 3 * gt.to_numpy(x) ** 2, rtol=1e-12)


def test_a_forward_jacobian_is_taken_where_entries_share_memory(gt):
    x = gt.xp.broadcast_to(array(gt, 2), (3, 2))
    cube = lambda x: x**3
    forward, reverse = (gt.jacobian(cube, mode=mode)(x) for mode in ("forward", "reverse"))
    assert forward.shape == (3, 2, 3, 2)
    np.testing.assert_allclose(gt.to_numpy(forward), gt.to_numpy(reverse), rtol=1e-12)


def test_a_tangent_is_pushed_where_entries_share_memory(gt):
    """As they do in the gradient of a sum."""
    x = gt.grad(gt.xp.sum)(array(gt, 2, 3))
    _, pushed = gt.jvp(lambda x: x**3, (x,), (array(gt, 2, 3),))
    np.testing.assert_allclose(gt.to_numpy(pushed), 3 * gt.to_numpy(array(gt, 2, 3)), rtol=1e-12)


def test_a_forward_jacobian_is_pushed_along(gt):
    x = array(gt, 3)
    slopes = lambda x: gt.xp.sum(gt.jacobian(lambda x: x**3, mode="forward")(x), axis=0)
    _, pushed = gt.jvp(slopes, (x,), (x,))
    np.testing.assert_allclose(gt.to_numpy(pushed), 6 * gt.to_numpy(x) ** 2, rtol=1e-12)


# --- the strategies themselves ------------------------------------------------------------


def test_the_reference_shares_nothing_with_what_it_judges():
    import gradtools.testing.strategies_program as program
    import gradtools.testing.strategies_reference as reference

    for module in (program, reference):
        found = {
            getattr(value, "__module__", "") for value in vars(module).values() if callable(value)
        }
        ours = {name for name in found if name.startswith("gradtools")}
        assert ours <= {"gradtools.errors", program.__name__, reference.__name__}


def test_text_and_meaning_know_the_same_operations():
    import gradtools.testing.strategies_program as program
    import gradtools.testing.strategies_reference as reference

    assert set(program.CALLS) == set(reference.CALLS)
    assert set(program.SIMPLE) == {*reference.SIMPLE, "where"}


def test_an_unknown_operator_is_refused_by_name():
    with pytest.raises(GradtoolsError, match=r"no operator 'gt.magic'; there are gt.grad, "):
        strategies.compositions(operators=["gt.grad", "gt.magic"])


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(GradtoolsError, match="pip install hypothesis"):
        strategies.compositions()


def test_a_limit_explains_only_programs_that_hold_its_cause():
    says = "RuntimeError: torch.func.grad don't yet support saved tensor hooks"
    plain = strategies.example(operators=["gt.grad"])
    hooked = strategies.example(operators=["gt.checkpoint"])
    assert limit_of(plain, says, "torch") is None
    assert limit_of(hooked, says, "jax") is None
    assert limit_of(hooked, says, "torch") in LIMITS
