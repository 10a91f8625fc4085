"""Random compositions of our operators and the frameworks' own, held against dual numbers.

GRADTOOLS_TEST_EXAMPLES=5000 draws as many programs, other ones each time.
"""

from __future__ import annotations

import os
from collections import Counter

import hypothesis
import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support import strategies
from tests.support.strategies import numbers, program, reference
from tests.support.strategies.limits import LIMITS, limit_of
from tests.support.strategies.program import REVERSE_ONLY
from tests.support.strategies.reference import evaluated

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


@pytest.mark.slow
@pytest.mark.sweep_at("jax")
def test_a_random_composition_has_the_numbers_of_the_reference(gt, backend_name):
    seen = Counter()
    slow = {"compiled"} if backend_name == "torch" else set()  # a compilation takes seconds there
    operators = set(strategies.OPERATORS) - slow
    everything = strategies.compositions(operators=operators)
    try_it = lambda program: tried(program, backend_name, seen)
    drawn(everything, EXAMPLES[backend_name], try_it)
    for rare in sorted(operators - set(seen)):
        drawn(strategies.compositions(operators={rare}), 10, try_it)
    assert seen["programs"] >= EXAMPLES[backend_name] // 2
    assert seen["refused"] < seen["programs"] / 10
    assert operators <= set(seen), "an operator never came"


@pytest.mark.sweep_at("torch")
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


@pytest.mark.sweep_at("torch")
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


@pytest.mark.sweep_at("jax")
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


@pytest.mark.slow
def test_a_defect_of_an_edit_is_caught(monkeypatch):
    """In PyTorch alone: it is the strategies that are tried."""
    pytest.importorskip("torch")
    import gradtools.torch as gt

    known = gt.replace_gradient
    mutant = lambda x, dx: known(x, 2 * dx)
    limits = {"operators": ["gt.grad"], "order": 1, "depth": 1, "lines": 2}
    assert "gt.replace_gradient(" in caught(
        "torch", monkeypatch, gt, "replace_gradient", mutant, **limits
    )


@pytest.mark.slow
def test_a_number_where_forward_mode_has_none_is_caught(monkeypatch):
    pytest.importorskip("torch")
    import gradtools.torch as gt

    linear = lambda x, dx: gt.scale_gradient(x, 1.0)
    said = caught(
        "torch", monkeypatch, gt, "replace_gradient", linear, operators=["gt.jvp"], complex=False
    )
    assert "is answered: forward mode meets an edit of the cotangent alone" in said
    with pytest.raises(AssertionError, match="which it must refuse"):
        exec(compile(said.partition("\n\n")[2], "<printed>", "exec"), {})


# --- what was found by drawing many ----------------------------------------------------------


def compiled(gt, f):
    return gt.compile(f, **({"backend": "aot_eager"} if gt.__name__.endswith("torch") else {}))


def array(gt, *shape):
    return gt.asarray(np.sin(1.0 + np.arange(float(np.prod(shape)))).reshape(shape))


@pytest.mark.slow_at("vjp", "jvp")
@pytest.mark.sweep_at("torch")
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


@pytest.mark.slow_at("jax")
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


@pytest.mark.slow_at("jax")
def test_a_frozen_function_that_edits_a_cotangent_refuses_a_second_derivative(gt):
    """PyTorch's wing took the edit for its own transposed, in silence."""
    x = array(gt, 3)
    G = gt.frozen(lambda x: gt.clip_gradient(x, max_norm=0.45) ** 2)
    loss = lambda x: gt.xp.sum(G(x) ** 2)
    norm = np.linalg.norm(gt.to_numpy(gt.grad(loss)(x)))
    np.testing.assert_allclose(norm, 0.45, rtol=1e-12)
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        with pytest.raises((GradtoolsError, TypeError), match=r"reverse rule only|forward-mode"):
            gt.hvp(loss, (x,), (x,), mode)


def test_a_known_gradient_may_be_the_array_itself_under_native_transforms(gt, backend_name):
    """What torch.func unwraps is one tensor under two names, which PyTorch refuses to save."""
    x = array(gt, 3)
    f = lambda y: gt.xp.sum(gt.replace_gradient(y, x) ** 2)
    if backend_name == "torch":
        from torch import func as native
    else:
        import jax as native
    for grad in (gt.grad, native.grad):
        np.testing.assert_array_equal(gt.to_numpy(grad(f)(x)), gt.to_numpy(x))


@pytest.mark.sweep_at("jax")
def test_forward_mode_does_not_enter_a_chunked_function_that_edits_a_cotangent(gt):
    """PyTorch's wing transposed its pullback, in silence."""
    x = array(gt, 3)
    f = gt.chunked(lambda x: gt.clip_gradient(x, max_norm=0.45) ** 2, 2)
    loss = lambda x: 100.0 * gt.xp.sum(f(x) ** 2)
    edit = r"reverse rule only|forward-mode"
    with pytest.raises((GradtoolsError, TypeError), match=edit):
        gt.jvp(f, (x,), (x,))
    with pytest.raises((GradtoolsError, TypeError), match=edit):
        gt.hvp(loss, (x,), (x,), "forward_over_reverse")
    gradient, _ = gt.hvp(loss, (x,), (x,), "reverse_over_reverse")
    sizes = np.split(gt.to_numpy(gradient[0]), [2])
    np.testing.assert_allclose([np.linalg.norm(part) for part in sizes], 0.45, rtol=1e-12)


def test_a_frozen_host_function_has_a_second_derivative(gt):
    """Its jvp, which is a transposed vjp, met saved-tensor hooks in PyTorch."""
    sin = gt.host_function(np.sin)
    sin.defvjp(lambda x: (sin(x), x), lambda x, c: (gt.xp.cos(x) * c,))
    x = array(gt, 3)
    G = gt.frozen(sin)
    _, (found,) = gt.hvp(lambda x: gt.xp.sum(G(x)), (x,), (x,), "reverse_over_reverse")
    at = gt.to_numpy(x)
    np.testing.assert_allclose(gt.to_numpy(found), -np.sin(at) * at, rtol=1e-12)


@pytest.mark.parametrize("mode", ["reverse_over_reverse", "forward_over_reverse"])
def test_a_second_derivative_inside_a_checkpoint_is_right(gt, mode):
    """torch.utils.checkpoint computes f again in the midst of f, and loses the tangent."""
    x = array(gt, 3)
    power = lambda x: gt.xp.sum((x * x) * (x * x))
    found = gt.checkpoint(lambda x: gt.hvp(power, (x,), (x,), mode)[1][0])(x)
    np.testing.assert_allclose(gt.to_numpy(found), 12 * gt.to_numpy(x) ** 3, rtol=1e-12)


# --- the reference ------------------------------------------------------------------------


@pytest.mark.slow
def test_reverse_mode_of_the_reference_agrees_with_its_forward_mode():
    seen = Counter()

    def holds(program):
        if {*program.operators()} & {*REVERSE_ONLY}:
            return
        seen["programs"] += 1
        expected, sight = evaluated(program)
        found, _ = evaluated(program, taped=True)
        assert np.abs(found - expected).max(initial=0) <= 1e-11 * sight.largest

    drawn(strategies.compositions(), MORE or 150, holds)
    assert seen["programs"] > 75


@pytest.mark.parametrize("values", [[3.0, -4.0], [3.0 + 4.0j, 0.1j], [0.1, 0.2]])
def test_the_reference_clips_in_closed_form(values):
    """f = Re<a, x> has the gradient a, first clipped and then clipped again at second order."""
    a, x = np.array(values), np.array(values) * 0.5
    leaf = numbers.Taped(x, (), 1)
    edits = {
        "modulus": (lambda c: numbers.by_modulus(c, 0.5), a * np.minimum(1, 0.5 / np.abs(a))),
        "norm": (lambda c: numbers.by_norm(c, 0.5), a * min(1, 0.5 / np.linalg.norm(a))),
    }
    for edit, expected in edits.values():
        out = numbers.edited_by(edit, leaf)
        np.testing.assert_allclose(numbers.pulled(out, a, leaf), expected, rtol=1e-14)
        tangent = numbers.edited_by(edit, numbers.Dual(x, a, 1)).tangent
        assert np.isnan(tangent).all()


@pytest.mark.sweep_at("jax")
def test_what_rows_share_is_clipped_once_and_their_own_is_clipped_each(gt):
    """As vmap has it: what does not depend on the row is computed once, and so is its edit."""
    w, rows = array(gt, 2), array(gt, 3, 2)
    by_clip = lambda w: gt.clip_gradient(w, max_norm=1e-3)
    outside = gt.grad(lambda w: gt.xp.sum(gt.vmap(lambda x: by_clip(w) * x)(rows)))(w)
    each = gt.per_example_grad(lambda w, x: gt.xp.sum(by_clip(w) * x))(w, rows)
    norm = lambda x: float(gt.xp.linalg.vector_norm(x))
    np.testing.assert_allclose(norm(outside), 1e-3, rtol=1e-12)
    np.testing.assert_allclose([norm(row) for row in each], 1e-3, rtol=1e-12)


# --- the strategies themselves ------------------------------------------------------------


def test_the_reference_shares_nothing_with_what_it_judges():
    for module in (program, reference, numbers):
        found = {
            getattr(value, "__module__", "") for value in vars(module).values() if callable(value)
        }
        ours = {name for name in found if name.startswith("gradtools")}
        assert ours <= {"gradtools.errors", *(m.__name__ for m in (program, reference, numbers))}


def test_text_and_meaning_know_the_same_operations():
    assert set(program.CALLS) == set(reference.CALLS)
    assert set(program.SIMPLE) == {*reference.SIMPLE, *reference.SWITCHED}


def test_an_unknown_operator_is_refused_by_name():
    with pytest.raises(GradtoolsError, match=r"no operator 'gt.magic'; there are gt.grad, "):
        strategies.compositions(operators=["gt.grad", "gt.magic"])


def test_a_limit_explains_only_programs_that_hold_its_cause():
    says = "RuntimeError: torch.func.grad don't yet support saved tensor hooks"
    plain = strategies.example(operators=["gt.grad"])
    hooked = strategies.example(operators=["gt.checkpoint"])
    assert limit_of(plain, says, "torch") is None
    assert limit_of(hooked, says, "jax") is None
    assert limit_of(hooked, says, "torch") in LIMITS
