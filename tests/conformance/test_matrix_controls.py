"""Negative controls: mutants of the library, each of which the scenario matrix must catch.

A mutant is planted in process. Before it stands the cells that it concerns hold; afterwards at
least one of them gives a wrong number (raising would not count), and the test says by which
oracle. A mutant that survives fails the test. What no cell concerns, such as keys and buffers, is
caught by a check that is named.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradtools.accumulate
import gradtools.arguments.batches
import gradtools.backend
import gradtools.chunking
import gradtools.clipping
import gradtools.custom_structure
import gradtools.derivatives
import gradtools.edits
import gradtools.jacobians
from gradtools.errors import GradtoolsError, GradtoolsWarning
from gradtools.testing.cross_checking import tolerances
from tests.conformance.rig.checking import CellVerdict, forget_compiled, judged
from tests.conformance.rig.matrix import Cell, cells
from tests.conformance.rig.problem import CALL, CLOSED, DIFFERENCES, EAGER
from tests.conformance.rig.reference import each_leaf

pytest_plugins = ["tests.support.compiled_programs"]
pytestmark = pytest.mark.usefixtures("compiled_programs_kept")

ALL = ("torch", "jax")


@dataclass(frozen=True)
class Mutant:
    """A defect of the library.

    Attributes:
        plant: Called with monkeypatch and a namespace.
        operators: The cells that are to catch it.
        oracle: By which it is caught.
        where: What else those cells must be.
        backends: Where the defect can be.
    """

    plant: Callable[[Any, Any], None]
    operators: tuple[str, ...]
    oracle: str = DIFFERENCES
    where: Callable[[Cell], bool] = lambda cell: cell.transform == "eager"
    backends: tuple[str, ...] = ALL


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *operators: str, **more: Any) -> Any:
    def register(plant: Any) -> Any:
        MUTANTS[name] = Mutant(plant, operators, **more)
        return plant

    return register


# --- derivatives -------------------------------------------------------------------------


@mutant("all gradients are zero", "grad", "vjp", "minimax_value_and_grad", "chunked")
def zero_backend(patch, gt):
    backend = gt._api._backend
    whole = backend.vjp

    def vjp(*args, **options):
        found = whole(*args, **options)
        pull = found.pullback
        zero = lambda g: None if g is None else 0 * g
        object.__setattr__(found, "pullback", lambda cts: [zero(g) for g in pull(cts)])
        return found

    patch.setattr(type(backend), "vjp", staticmethod(vjp))


def is_complex(cell):
    return cell.dtype == "complex128" and cell.transform == "eager"


@mutant(
    "the conjugate is missing at the wing's edge",
    "vjp",
    "grad",
    where=is_complex,
    backends=("jax",),
)
def no_conjugate(patch, gt):
    import gradtools.jax.engines as engines

    patch.setattr(engines, "_conjugated", list)


@mutant("the maximising player descends", "minimax_value_and_grad", oracle=CALL)
def minimax_sign(patch, gt):
    patch.setattr(gradtools.derivatives.Derivatives, "_negated", lambda self, tree: tree)


@mutant("a mixed partial without its factor", "mixed_partial")
def no_factor(patch, gt):
    whole = gradtools.jacobians.Jacobians._pushed_through

    def halved(self, G, z, us):
        g, ws = whole(self, G, z, us)
        return g, [each_leaf(lambda w: w / 2, w) for w in ws]

    patch.setattr(gradtools.jacobians.Jacobians, "_pushed_through", halved)


@mutant("the pullback is half detached", "hvp, reverse over reverse", "hessian", "grad of jvp")
def lost_term(patch, gt):
    whole = gradtools.backend.Differentiation.filled

    def filled(self, values, likes):
        return [(g + self.stop_gradient(g)) / 2 for g in whole(self, values, likes)]

    patch.setattr(gradtools.backend.Differentiation, "filled", filled)


@mutant("the gradient is returned as the Hessian's product", "hvp, forward over reverse")
def gradient_for_product(patch, gt):
    whole = gt.hvp
    patch.setattr(gt, "hvp", lambda *args, **more: (whole(*args, **more)[0],) * 2)


def square(cell):
    return cell.transform == "eager" and cell.program.name in (
        "cumulative sum",
        "rolled and flipped",
        "recurrence",
        "differences",
        "sorted",
        "convolved by hand",
    )


@mutant("a Jacobian is transposed", "jacobian, forward", "jacobian, reverse", where=square)
def transposed(patch, gt):
    whole = gt.jacobian
    flip = lambda j: j.T if j.ndim == 2 and j.shape[0] == j.shape[1] else j
    patch.setattr(
        gt,
        "jacobian",
        lambda f, *args, **more: lambda *xs: each_leaf(flip, whole(f, *args, **more)(*xs)),
    )


@mutant(
    "a Hessian without its off-diagonal blocks",
    "hessian",
    where=lambda cell: "several" in cell.program.tags and cell.transform == "eager",
)
def diagonal(patch, gt):
    whole = gt.hessian

    def only(f, argnums):
        def run(*xs):
            rows = whole(f, argnums)(*xs)
            return tuple(
                tuple(h if i == j else 0 * h for j, h in enumerate(row))
                for i, row in enumerate(rows)
            )

        return run

    patch.setattr(gt, "hessian", only)


@mutant("a tangent of the wrong sign", "jvp", "scale_gradient, forward")
def tangent_sign(patch, gt):
    whole = gt.jvp

    def jvp(*args, **more):
        out, dout, *rest = whole(*args, **more)
        return out, each_leaf(lambda dy: -dy, dout), *rest

    patch.setattr(gt, "jvp", jvp)


@mutant("the value is that of a moved point", "value_and_grad", oracle=CALL)
def stale_value(patch, gt):
    whole = gt.value_and_grad

    def moved(f, **options):
        def run(*args, **kwargs):
            value, grads = whole(f, **options)(*args, **kwargs)
            return each_leaf(lambda v: v * 1.001 if "float" in str(v.dtype) else v, value), grads

        return run

    patch.setattr(gt, "value_and_grad", moved)


@mutant("every example gets the mean", "per_example_grad")
def mean_of_examples(patch, gt):
    whole = gradtools.arguments.batches.Batch.map

    def same(self, one, chunk_size):
        mean = lambda g: 0 * g + g.mean()
        return each_leaf(mean, whole(self, one, chunk_size))

    patch.setattr(gradtools.arguments.batches.Batch, "map", same)


@mutant(
    "the zeros of a disconnected leaf are ones",
    "grad",
    "clip_gradient",
    where=lambda cell: cell.arguments == "disconnected",
    backends=("torch",),
)
def ones_for_zeros(patch, gt):
    def filled(self, values, likes):
        pairs = zip(values, likes, strict=True)
        return [self.ones_like(x) if g is None else g for g, x in pairs]

    patch.setattr(gradtools.backend.Differentiation, "filled", filled)


@mutant(
    "vmap puts its rows out in reverse",
    "grad",
    "jvp",
    "scale_gradient",
    oracle=EAGER,
    where=lambda cell: cell.transform == "vmap",
)
def swapped_rows(patch, gt):
    whole = gt.vmap
    flip = lambda tree: each_leaf(lambda y: gt.xp.flip(y, axis=0), tree)
    patch.setattr(gt, "vmap", lambda f, **more: lambda *xs: flip(whole(f, **more)(*xs)))


# --- edits -------------------------------------------------------------------------------


@mutant("reverse_gradient does not reverse", "reverse_gradient")
def reverse_sign(patch, gt):
    whole = gradtools.edits.Edits._scaled
    patch.setattr(
        gradtools.edits.Edits,
        "_scaled",
        lambda self, name, x, scale, sign: whole(self, name, x, scale, 1),
    )


@mutant("the scale is forgotten", "scale_gradient", "reverse_gradient, twice")
def no_scale(patch, gt):
    whole = gradtools.edits.Edits._scaled
    patch.setattr(
        gradtools.edits.Edits,
        "_scaled",
        lambda self, name, x, scale, sign: whole(self, name, x, 1.0, sign),
    )


@mutant("the scale is forgotten at second order", "reverse_gradient, twice", backends=("jax",))
def scale_once(patch, gt):
    import jax

    def reverse(x, scale):
        once = jax.custom_vjp(lambda x: x)
        once.defvjp(lambda x: (x, None), lambda _, ct: (-scale * ct,))
        return each_leaf(once, x)

    patch.setattr(gt, "reverse_gradient", reverse)


@mutant("stop_gradient lets it through", "stop_gradient")
def open_stop(patch, gt):
    patch.setattr(gt, "stop_gradient", lambda x: x)


@mutant(
    "clip_gradient's norm is of each leaf alone",
    "clip_gradient",
    oracle=CLOSED,
    where=lambda cell: "several" in cell.program.tags and cell.transform == "eager",
)
def norm_of_a_leaf(patch, gt):
    whole = gradtools.clipping._clip_norm
    patch.setattr(
        gradtools.clipping,
        "_clip_norm",
        lambda backend, cts, bound: [whole(backend, [ct], bound)[0] for ct in cts],
    )


@mutant("a known gradient is added, not put in place", "replace_gradient", oracle=CLOSED)
def known_added(patch, gt):
    whole = gt.replace_gradient

    def added(x, dx):
        both = lambda a, b: a + b - gt.stop_gradient(b)
        return each_leaf(both, whole(x, dx), x)

    patch.setattr(gt, "replace_gradient", added)


@mutant("transform_gradient transforms twice", "transform_gradient", oracle=CLOSED)
def transformed_twice(patch, gt):
    whole = gt.transform_gradient
    patch.setattr(gt, "transform_gradient", lambda x, fn: whole(x, lambda ct: fn(fn(ct))))


@mutant("straight_through's surrogate is dropped", "straight_through", "straight_through, twice")
def no_surrogate(patch, gt):
    patch.setattr(gradtools.edits._StraightThrough, "_through", lambda self, args, kwargs: args[0])


# --- rules and memory --------------------------------------------------------------------


@mutant("a residual is of an earlier point", "custom_rule", "host_function")
def stale_residual(patch, gt):
    whole = gradtools.custom_structure.Residuals.restored

    def stale(self, backend, saved):
        return each_leaf(lambda x: 0.9 * x, whole(self, backend, saved))

    patch.setattr(gradtools.custom_structure.Residuals, "restored", stale)
    if gt._api._backend.name == "torch":  # plain eager calls go another way
        import gradtools.torch.rules.functions as rules
        from gradtools.torch._upstream import backward_class

        node = backward_class(rules._BothModes)
        backward = node.apply

        def directly(ctx, *cts):
            if ctx.point.checked is None:
                return backward(ctx, *cts)
            saved = tuple([0.9 * x for x in ctx.saved_tensors])
            return backward(SimpleNamespace(point=ctx.point, saved_tensors=saved), *cts)

        patch.setattr(node, "apply", directly)


@mutant("a forward rule is transposed with the wrong sign", "custom_rule, transposed")
def transposed_rule(patch, gt):
    minus = lambda xs: [None if x is None else -x for x in xs]
    if gt._api._backend.name == "torch":
        import gradtools.torch.rules.maps as rules
        import gradtools.torch.rules.signatures as direct

        whole = rules.transposed
        patch.setattr(rules, "transposed", lambda *args: minus(whole(*args)))
        patch.setattr(direct, "_recorded", lambda *args: None)  # all maps are transposed
        patch.setattr(direct.Signature, "pushforward", lambda *args: None)
        return
    import gradtools.jax.rules.linearizing as linearizing

    hoist = linearizing.hoist  # of the transposed rule

    def wrong(fun, *examples):
        run, consts = hoist(fun, *examples)
        return lambda *args: minus(run(*args)), consts

    patch.setattr(linearizing, "hoist", wrong)


@mutant(
    "microbatched_value_and_grad counts the last chunk as a whole one",
    "microbatched_value_and_grad",
    oracle=CALL,
)
def unweighted(patch, gt):
    whole = gradtools.chunking._Microbatches.weight
    patch.setattr(
        gradtools.chunking._Microbatches,
        "weight",
        lambda self, args, given, value, size: whole(self, args, given, value, 2),
    )


@mutant("a chunk is dropped and another taken twice", "chunked", "chunked, twice")
def dropped_chunk(patch, gt):
    whole = gt.chunked

    def dropped(f, size, **more):
        inner = whole(f, size, **more)
        first = lambda x: gt.xp.concat([x[:-1], x[:1]])

        def run(batch, *rest):
            return inner(each_leaf(first, batch), *rest)

        return run

    patch.setattr(gt, "chunked", dropped)


@mutant("the accumulator forgets its weights", "GradientAccumulator")
def no_weights(patch, gt):
    whole = gradtools.accumulate.GradientAccumulator.add
    patch.setattr(
        gradtools.accumulate.GradientAccumulator,
        "add",
        lambda self, grads, weight=1: whole(self, grads, 1),
    )


@mutant("frozen's second term is missing", "frozen, twice")
def frozen_term(patch, gt):
    whole = gt.frozen

    def cut(G):
        frozen = whole(G)
        return lambda *xs, **more: each_leaf(
            lambda a, b: gt.stop_gradient(a) + (b - gt.stop_gradient(b)),
            frozen(*xs, **more),
            linear(G)(*xs, **more),
        )

    def linear(G):
        """What has G's first derivative and no second one."""

        def run(*xs, **more):
            at = each_leaf(gt.stop_gradient, list(xs))
            steps = each_leaf(lambda x, a: x - a, list(xs), at)
            return gt.jvp(lambda *ys: G(*ys, **more), tuple(at), tuple(steps))[1]

        return run

    patch.setattr(gt, "frozen", cut)


@mutant("checkpoint loses half of the gradient", "checkpoint", "checkpoint, twice")
def cut_checkpoint(patch, gt):
    half = lambda out: each_leaf(lambda y: (y + gt.stop_gradient(y)) / 2, out)
    patch.setattr(gt, "checkpoint", lambda f: lambda *xs, **more: half(f(*xs, **more)))


# --- defects that no cell concerns, each with the check that sees them --------------------


def small_errors_are_seen(gt, backend):
    """A relative error of 1e-6 in a gradient fails in 64 bits."""
    cell = next(c for c in cells(backend) if c.operator.name == "grad" and c.dtype == "float64")
    whole = gt.grad
    with pytest.MonkeyPatch.context() as patch:
        off = lambda f, *a, **k: (
            lambda *x, **m: each_leaf(lambda g: g * (1 + 1e-6), whole(f, *a, **k)(*x, **m))
        )
        patch.setattr(gt, "grad", off)
        return bool(judged(cell, backend).failure)


def chunks_draw_numbers_of_their_own(gt, backend):
    """Each chunk's key gives another number."""
    words = lambda k: (
        gt.xp.astype(gt.split_key(k, 2)[0], gt.xp.float32) if backend == "torch" else k
    )
    if backend == "torch":
        one = lambda x, k: x * 0 + gt.xp.sum(words(k))
    else:
        import jax

        one = lambda x, k: x * 0 + jax.random.uniform(k)
    drawn = gt.to_numpy(
        gt.chunked(one, 2, key_argnums=1)(gt.asarray(np.zeros(4)), gt.random_key(3))
    )
    return drawn[0] == drawn[1] and drawn[1] != drawn[2]


def buffers_are_counted_once(gt, backend):
    """Batch normalisation counts a chunk once, though it is computed twice."""
    import torch

    model = torch.nn.BatchNorm1d(2)
    x = torch.randn(6, 2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradtoolsWarning)  # that each chunk has its own statistics
        loss = (gt.chunked(model, 2)(x) ** 2).sum()
        try:
            loss.backward()
        except GradtoolsError as error:
            return "num_batches_tracked is not changed as often" not in str(error)
    return int(model.num_batches_tracked) == 3


def widened(patch, gt):
    patch.setitem(tolerances.FINITE_DIFFERENCES, "float64", 1e-3)


def shared_key(patch, gt):
    arrays = gt._api._backend.submodule("arrays", "key_argnums")
    patch.setattr(arrays, "fold_in", lambda key, index: key)


def unrestored(patch, gt):
    from gradtools.torch.state import Snapshot

    patch.setattr(Snapshot, "restore", lambda self: None)


CHECKED = {
    "the table of tolerances is widened": (widened, small_errors_are_seen, ALL),
    "a key is shared between chunks": (shared_key, chunks_draw_numbers_of_their_own, ALL),
    "a buffer is not restored after the replay": (unrestored, buffers_are_counted_once, ("torch",)),
}


@pytest.mark.sweep_at(
    ("jax", "the table of tolerances is widened"), ("jax", "a key is shared between chunks")
)
@pytest.mark.parametrize("name", CHECKED)
def test_a_mutant_is_caught_by_a_check_that_is_named(name, gt, backend_name, monkeypatch):
    plant, check, backends = CHECKED[name]
    if backend_name not in backends:
        pytest.skip(f"this defect cannot be in {backend_name}")
    assert check(gt, backend_name)
    with monkeypatch.context() as patch:
        plant(patch, gt)
        forget_compiled(backend_name)
        assert not check(gt, backend_name), f"{name} survives {check.__name__}"
    forget_compiled(backend_name)
    print(f"{name}: caught by {check.__name__}")


# --- each is caught ----------------------------------------------------------------------


def concerned(one: Mutant, backend: str) -> list[Cell]:
    """Three cells of each operator in 64 bits, of programs that bend."""
    plain = {"mean of squares", "sum of an empty array", "empty output"}
    found = []
    for name in one.operators:
        mine = [
            cell
            for cell in cells(backend)
            if cell.operator.name == name
            and not cell.reason
            and cell.dtype in ("float64", "complex128")
            and cell.program.name not in plain
            and one.where(cell)
        ]
        found += mine[:3]
    return found


WHOLE: dict[tuple[str, str], CellVerdict] = {}


def judged_whole(cell: Cell, backend: str) -> CellVerdict:
    """The verdict on the library as it is: several mutants ask for the same cells."""
    key = (backend, str(cell))
    if key not in WHOLE:
        WHOLE[key] = judged(cell, backend)
    return WHOLE[key]


@pytest.mark.sampled(torch=(24, 28), jax=(0, 1))
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, gt, backend_name, monkeypatch):
    one = MUTANTS[name]
    if backend_name not in one.backends:
        pytest.skip(f"this defect cannot be in {backend_name}")
    asked = concerned(one, backend_name)
    assert asked
    assert not [cell for cell in asked if judged_whole(cell, backend_name).failure]
    with monkeypatch.context() as patch:
        one.plant(patch, gt)
        forget_compiled(backend_name)
        verdicts = [judged(cell, backend_name) for cell in asked]
    forget_compiled(backend_name)
    caught = {v.oracle for v in verdicts if v.failure and v.oracle}
    print(f"{name}: caught by {', '.join(sorted(caught)) or 'nothing'}")
    assert one.oracle in caught, [str(v) for v in verdicts]


def test_there_are_twenty_mutants_for_each_backend():
    for backend in ALL:
        assert sum(backend in one.backends for one in MUTANTS.values()) >= 20
