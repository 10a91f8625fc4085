"""The public operator that writes derivatives as mathematics: `formula`.

The wing records one run of f in the vocabulary of `operation_record.py`; `derive` makes the
adjoint program of it, in which no framework takes part. Before it is returned it is computed in
NumPy at random points near the arguments, and held against the framework's own automatic
differentiation of f: reverse mode, and at order 2 reverse mode of reverse mode. All of this is
done in float64 and complex128 where f runs in them, else in f's own precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.arguments.checks import order_among
from gradtools.backend import Backend, Operators, P
from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError
from gradtools.seeing.frameworks import Framework
from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.graphs.program import LeafProgram, spoken

if TYPE_CHECKING:  # half of what gradtools would import, of which most programs need nothing
    from gradtools.seeing.formulas import Formula
    from gradtools.seeing.formulas.recorded import Recorded

_POINTS = 3
_EXACT = 1e-8
_IN_SINGLE = 2e-4  # of float32: some thousand times its precision


class Formulating(Operators):
    """The operator that says what differentiation computes, bound to one backend."""

    def formula(
        self,
        f: Callable[P, Any],
        *args: Any,
        order: int = 1,
        wrt: int | tuple[int, ...] = 0,
        **kwargs: Any,
    ) -> Formula:
        """The adjoint program of f as mathematics, compared with automatic differentiation.

        With y = f(x) and a cotangent ȳ for each output, a bar is the cotangent of what is under
        it; at order 2 the adjoint program is differentiated once more, along a direction u for
        each cotangent::

            order 1    x, ȳ     ->  x̄ = Jᴴ ȳ
            order 2    x, ȳ, u  ->  ∂s/∂x, ∂s/∂ȳ   of   s = <u, x̄>

        The formula is computed at random points near the arguments and compared with what the
        framework differentiates itself; where they differ nothing is returned. What holds for
        one run of f alone, such as the branch of a Python ``if``, is part of the formula.
        Operations without a translation keep their names and are marked; where such a one cannot be
        computed or differentiated, the formula is not compared, and says so.

        Args:
            f: Takes and returns pytrees of arrays; a module, too. Inputs are called as f calls
                its parameters.
            *args: Arguments of f; arrays of any shape and dtype.
            order: 1, or 2 with the double backward.
            wrt: The position of the argument to which it is differentiated, or of several; its
                leaves are floating or complex. In PyTorch parameters that f holds and that require
                grad are differentiated as well, and ``wrt=()`` means these alone.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Formula`: ``str()`` for terminals, ``.latex()`` for papers, and by itself in
            notebooks; ``.marked`` are the names of operations without a translation, ``.check``
            is the record of the comparison, and ``.agrees_with(derivation)`` holds a derivation
            by hand against it.

        Raises:
            GradtoolsError: order is not 1 or 2; wrt is out of range or names an integer argument;
                f raises, returns no array, or what it computes cannot be differentiated by the
                framework; the formula and automatic differentiation differ (which would be a
                fault of gradtools, and is told with both values).

        Example:
            >>> w, x = gt.asarray(np.ones((2, 3), "f")), gt.asarray(np.ones(3, "f"))
            >>> found = gt.formula(lambda W, x: W @ x, w, x, wrt=(0, 1))
            >>> found.lines(1)
            ['W̄ = ȳ xᵀ', 'x̄ = Wᵀ ȳ']
            >>> bool(found.agrees_with(lambda W, x, ct: (gt.xp.linalg.outer(ct, x), W.T @ ct)))
            True

        Source: Giles, Collected matrix derivative results for forward and reverse mode
        algorithmic differentiation, 2008; for complex numbers Kreutz-Delgado, 2009.
        """
        order = order_among("formula", order, (1, 2), "1, or 2 with the double backward")
        if not Framework(self._backend, "formula").recorded_run.watchable():
            raise GradtoolsError(
                "formula: f is looked at with numbers, in plain eager code only, not inside of a "
                "transform (vmap, grad, jit) or in compiled code. Call formula outside."
            )
        program = LeafProgram(self._backend, "formula", f, args, kwargs, wrt)
        names = _leaf_names(f, program.names)
        leaves = list(program.leaves)
        try:
            return _formulated(program, names, order, wide=True)
        except _FormulaDiffers as error:
            raise GradtoolsError(str(error)) from error.__cause__
        except Exception:  # f does not run in double precision: in its own it says why
            program.leaves = leaves
        return _in_own_precision(program, names, order)


def _in_own_precision(program: LeafProgram, names: Sequence[str], order: int) -> Formula:
    try:
        return _formulated(program, names, order, wide=False)
    except _FormulaDiffers as error:
        raise GradtoolsError(str(error)) from error.__cause__
    except GradtoolsError:
        raise
    except Exception as error:
        what = _told(error)
        missing = _missing(program)
        if missing:
            raise GradtoolsError(_NO_DERIVATIVE.format(missing)) from error
        if _runs(program):
            raise GradtoolsError(
                f"formula: f runs, but its formula could not be made ({what}). If the framework "
                "differentiates f at these arguments, please report the function."
            ) from error
        raise GradtoolsError(
            f"formula: f raised {what}. It must run, and be differentiated, at the arguments at "
            "which it is looked at."
        ) from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}{place_of(error)}"


_NO_DERIVATIVE = (
    "formula: f runs, and automatic differentiation of it does not ({}), so there is nothing to "
    "hold a formula against."
)


def _missing(program: LeafProgram) -> str:
    """What the framework raises when it differentiates f, which runs; empty if it does."""
    if not _runs(program):
        return ""
    backend = program.backend
    leaves = list(program.leaves)

    def outputs(*xs: Any) -> tuple[list[Any], list[Any]]:
        for k, x in zip(program.wrt, xs, strict=True):
            leaves[k] = x
        ys = [backend.asarray(y) for y in program.run(leaves)]
        return [y for y in ys if backend.is_inexact(y)], []

    try:
        with _trying(program, wide=False):
            xs = [program.leaves[k] for k in program.wrt]
            result = backend.vjp(outputs, xs, groups=None, once=False)
            result.pullback([backend.ones_like(y) for y in result.outs])
    except Exception as error:
        return _told(error)
    return ""


def _runs(program: LeafProgram) -> bool:
    """Whether f runs when nobody writes it down."""
    try:
        program.framework.recorded_run.rerun(program.run, program.leaves)
    except Exception:  # f's own error, which is told with its line
        return False
    return True


class _FormulaDiffers(GradtoolsError):
    """The formula is not what the framework computes."""


_FREE_SIGNS = (
    "formula: the value of f depends on the signs (for complex ones the phases) of singular "
    "vectors or eigenvectors, which nothing determines and each library chooses for itself, so "
    "that it cannot be compared. Ask for what does not depend on them, such as u * s @ vh."
)
_AS_RECORDED = (
    "written as f computes it, for with names such as softplus the values differ at the arguments:"
)
_OTHER_PROGRAM = (
    "nearby f runs another program (a branch, a mask or a number that is taken from the values)"
)
_OTHER_DRAWS = "nearby f draws other numbers, for what it draws from depends on the values"
_NO_NEIGHBOURS = "nearby f is not defined (it raises, or a value is not finite)"
_STEPS = (0.1, 0.01, 0.001)  # to the random points, relative to the given arguments
_AT_AN_EDGE = (
    "but not at the given arguments, which stand at a tie, at an edge or where a number is no "
    "longer finite:"
)


# --- names -------------------------------------------------------------------------------


def _leaf_names(f: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """The paths of the leaves, with f's own names of its parameters; x where it has none."""
    alone = not any("argument 1" in name for name in names)
    return [re.sub(r"^argument (\d+)", "x" if alone else r"x\1", n) for n in spoken(f, names)]


# --- the formula and its comparison ------------------------------------------------------


def _trying(program: LeafProgram, wide: bool) -> AbstractContextManager[Any]:
    """A block after which all that a run of f changed is put back.

    wide: Arrays of 64 bits may be made; f's parameters and captured arrays are read in 64 bits.
    """
    block: AbstractContextManager[Any] = program.framework.programs.trying(program, wide)
    return block


def _formula_graph(program: LeafProgram) -> PlainGraph:
    """One run, forward only, in the operations of `seeing/formulas/operations/`.

    Its inputs are the program's leaves; a `Recorded` holds the arrays that it captures. An
    operation that is not among these keeps the framework's name.
    """
    graph: PlainGraph = program.framework.programs.formula_graph(program)
    return graph


def _formulated(program: LeafProgram, names: Sequence[str], order: int, wide: bool) -> Formula:
    """The formula of one run, compared."""
    from gradtools.seeing.formulas import derive
    from gradtools.seeing.formulas.recorded import as_recorded

    backend = program.backend
    given = [_values(backend, x) for x in program.leaves]
    with _trying(program, wide):
        if wide:
            program.leaves = [_widened(backend, x) for x in program.leaves]
        recorded = as_recorded(_formula_graph(program))
        case = _RecordedRun(
            program, recorded, wide, [*given, *_held(backend, recorded, recorded.wanted)]
        )
    opened = recorded.opened
    called = dict(zip(recorded.inputs, names, strict=True))
    active = [*program.wrt, *range(len(recorded.inputs), len(opened.inputs))]
    held = dict(zip(opened.captured, _held(backend, recorded, opened.captured), strict=True))

    def derived(named: bool) -> Formula:
        formula = derive(opened, order, called, active, named)
        return formula.at(case.given, held, case.calling)

    return case.compared(derived)


def _values(backend: Backend, x: Any) -> np.ndarray:
    """In float64 and complex128, integers as they are."""
    result = np.asarray(backend.to_numpy(x))
    if result.dtype.kind in "biuc":
        return result.astype(np.complex128) if result.dtype.kind == "c" else result
    return result.astype(np.float64)


def _widened(backend: Backend, x: Any) -> Any:
    if not backend.is_inexact(x):
        return x
    return backend.cast(x, "complex128" if backend.is_complex(x) else "float64")


def _held(backend: Backend, recorded: Recorded, numbers: Sequence[int]) -> list[np.ndarray]:
    missing = [recorded.values[v].name or "a value" for v in numbers if v not in recorded.held]
    if missing:
        raise GradtoolsError(f"formula: the record does not hold the values of {missing}.")
    return [_values(backend, recorded.held[v]) for v in numbers]


@dataclass
class _RecordedRun:
    """A recorded run, to be held against automatic differentiation.

    Attributes:
        program: The user's call.
        recorded: Its record.
        wide: Whether it is computed in double precision.
        given: The values of its inputs, and of what is wanted.
    """

    program: LeafProgram
    recorded: Recorded
    wide: bool
    given: list[np.ndarray]

    @property
    def backend(self) -> Backend:
        return self.program.backend

    def compared(self, derived: Callable[[bool], Formula]) -> Formula:
        """The formula with the record of its comparison.

        derived: Makes it, with the names of what is recognised or as it was recorded.
        """
        from gradtools.seeing.formulas import Differs, Outside

        formula = derived(True)
        try:
            result = self._at_random(formula)
        except Outside:
            return self._of_one_run(formula, _NO_NEIGHBOURS)
        except GradtoolsError as error:
            if self._changes(formula.near(self.given)):
                return self._of_one_run(formula, _OTHER_PROGRAM)
            if formula.draws:
                return self._of_one_run(formula, _OTHER_DRAWS)
            as_recorded = self._as_recorded(derived)
            if as_recorded is None or not isinstance(error, Differs):
                signs = isinstance(error, Differs) and formula.has_free_signs
                raise _FormulaDiffers(_FREE_SIGNS if signs else str(error)) from error
            return as_recorded.noted(f"{_AS_RECORDED} {error.values()}", given=True)
        try:
            self._at_given(formula)
        except Differs as error:
            as_recorded = self._as_recorded(derived)
            if as_recorded is not None:
                return as_recorded.noted(f"{_AS_RECORDED} {error.values()}", given=True)
            return result.noted(f"{_AT_AN_EDGE} {error.values()}")
        return result.noted("", given=True)

    def _at_random(self, formula: Formula, finite: bool = True) -> Formula:
        """At points near the given arguments, and as near as f's domain asks for."""
        from gradtools.seeing.formulas import Outside

        for step in _STEPS:
            sample = formula.near(self.given, step)
            points = lambda rng, sample=sample: self._rounded(sample(rng))
            try:
                return self._checked(formula, points, finite)
            except Outside as error:
                outside = error
        raise outside

    def _at_given(self, formula: Formula, finite: bool = False) -> Formula:
        here = lambda rng: self._rounded((self.given, *formula.point(rng)[1:]))
        return self._checked(formula, here, finite, at_given=True)

    def _checked(
        self,
        formula: Formula,
        sample: Callable[[np.random.Generator], Any],
        finite: bool,
        at_given: bool = False,
    ) -> Formula:
        return formula.verified(
            _FrameworkNumbers(self, formula, not at_given),
            points=1 if at_given else _POINTS,
            tolerance=self._tolerance(formula.order),
            sample=sample,
            finite=finite,
        )

    def _of_one_run(self, formula: Formula, why: str) -> Formula:
        try:
            result = self._at_given(formula, finite=True)
        except GradtoolsError as error:
            raise _FormulaDiffers(str(error)) from error
        return result.noted(f"{why}; compared at the given arguments alone, for which it holds")

    def _as_recorded(self, derived: Callable[[bool], Formula]) -> Formula | None:
        """The formula without names, if it gives what the framework computes; NaN is NaN."""
        from gradtools.seeing.formulas import Differs

        formula = derived(False)
        try:
            self._at_given(formula)
            return self._at_random(formula, finite=False)
        except Differs:
            return None

    def _tolerance(self, order: int) -> float:
        if self.wide and not self.recorded.narrow:
            return _EXACT
        kinds = {self.recorded.narrow, *self._kinds()}
        if kinds & {"float16", "bfloat16", "complex32"}:
            raise GradtoolsError(
                "formula: f does not run in float64, and what it gives in 16 bits is too coarse "
                "for a comparison. Pass float32 arguments."
            )
        return _IN_SINGLE * 10 ** (order - 1) if kinds & {"float32", "complex64"} else _EXACT

    def _kinds(self) -> set[str]:
        """The dtypes in which f runs."""
        if self.wide:
            return set()
        kinds = {self.backend.dtype_name(x) for x in self.program.leaves}
        held = [self.recorded.held[v] for v in self.recorded.wanted]
        return kinds | {self.backend.dtype_name(x) for x in held}

    def _rounded(self, point: Any) -> Any:
        """The point in the precision in which f runs."""
        inputs, cotangents, directions = point
        if self.wide:
            return point
        inexact = [x.dtype.kind in "fc" for x in inputs]
        pairs = zip(inputs, inexact, strict=True)
        arrays = [x.astype(self._dtype(k)) if i else x for k, (x, i) in enumerate(pairs)]
        single = any(a.dtype in (np.float32, np.complex64) for a in arrays)
        return arrays, *(
            [_single(x) if single else x for x in xs] for xs in (cotangents, directions)
        )

    def _dtype(self, k: int) -> str:
        held = [self.recorded.held[v] for v in self.recorded.wanted]
        return self.backend.dtype_name([*self.program.leaves, *held][k])

    def _changes(self, sample: Callable[..., Any]) -> bool:
        """Whether f runs another program at one of the points."""
        rng, before = np.random.default_rng(0), self.program.leaves
        try:
            for _ in range(_POINTS):
                inputs = self._rounded(sample(rng))[0]
                with _trying(self.program, self.wide):
                    self.program.leaves = self.leaves(inputs[: len(before)])
                    if fingerprint(_formula_graph(self.program)) != self._mark:
                        return True
        finally:
            self.program.leaves = before
        return False

    @property
    def _mark(self) -> Any:
        return fingerprint(self.recorded)

    def leaves(self, values: Sequence[Any]) -> list[Any]:
        """The framework's arrays of all inputs; integers and random keys as they were given."""
        own = self.program.leaves
        kept = [k < len(own) and not self.backend.is_inexact(own[k]) for k in range(len(values))]
        arrays = self.arrays([x for x, keep in zip(values, kept, strict=True) if not keep])
        rest = iter(arrays)
        return [own[k] if keep else next(rest) for k, keep in enumerate(kept)]

    def arrays(self, values: Sequence[Any]) -> list[Any]:
        """The framework's arrays."""
        beside = next(iter(self.program.leaves), None)
        return [self.backend.asarray(np.asarray(x), beside) for x in values]

    def calling(self, derivation: Callable[..., Any]) -> Callable[..., Any]:
        """A derivation in the framework as one of NumPy arrays, in the same precision."""

        def called(*values: np.ndarray) -> Any:
            with _trying(self.program, self.wide):
                result = derivation(*self.arrays(values))
                parts = list(result) if isinstance(result, tuple | list) else [result]
                done = [None if x is None else self.backend.to_numpy(x) for x in parts]
            return tuple(done) if isinstance(result, tuple | list) else done[0]

        return called


def _single(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex64 if x.dtype.kind == "c" else np.float32)


class _FrameworkNumbers:
    """The framework's own numbers, in the form that `Formula.verified` compares.

    is_near: Whether the points are others than the given arguments, at which f may raise.
    """

    def __init__(self, case: _RecordedRun, formula: Formula, is_near: bool) -> None:
        self._is_near = is_near
        self._case, self._backend, self._order = case, case.backend, formula.order
        opened = case.recorded.opened
        self._active = [
            k
            for k in [*case.program.wrt, *range(len(case.recorded.inputs), len(opened.inputs))]
            if opened.values[opened.inputs[k]].is_inexact
        ]
        self._inexact = [opened.values[v].is_inexact for v in opened.outputs]

    def __call__(
        self, inputs: list[Any], cotangents: list[Any], directions: list[Any]
    ) -> tuple[list[Any], ...]:
        from gradtools.seeing.formulas import Outside

        try:
            return self._computed(inputs, cotangents, directions)
        except GradtoolsError:
            raise
        except Exception as error:  # at the given arguments f itself runs
            if not self._is_near:
                raise GradtoolsError(_NO_DERIVATIVE.format(_told(error))) from error
        try:  # once more: what failed by chance is no edge of where f is defined
            return self._computed(inputs, cotangents, directions)
        except GradtoolsError:
            raise
        except Exception as error:
            raise Outside(_NO_DERIVATIVE.format(_told(error))) from error

    def _computed(
        self, inputs: list[Any], cotangents: list[Any], directions: list[Any]
    ) -> tuple[list[Any], ...]:
        case = self._case
        with _trying(case.program, case.wide):
            self._leaves = case.leaves(inputs)
            xs = [self._leaves[k] for k in self._active]
            cts, us = case.arrays(cotangents), case.arrays(directions)
            first = self._backend.vjp(self._outputs, xs, groups=None, once=False)
            grads = self._filled(first.pullback(cts), xs)
            results = [self._ordered(first.outs, first.extras), self._spread(grads)]
        if self._order == 2:
            with _trying(case.program, case.wide):  # the same draws again
                results.append(self._second(xs, cts, us))
        with _trying(case.program, case.wide):
            return tuple([self._numpy(x) for x in group] for group in results)

    def _outputs(self, *xs: Any) -> tuple[list[Any], list[Any]]:
        """f of the leaves that are differentiated: its inexact outputs, and the others."""
        leaves = list(self._leaves)
        for k, x in zip(self._active, xs, strict=True):
            leaves[k] = x
        run = self._case.recorded.run or self._case.program.run
        beside = next(iter(leaves), None)
        ys = [self._backend.asarray(y, beside) for y in run(leaves)]
        pairs = list(zip(ys, self._inexact, strict=True))
        return [y for y, inexact in pairs if inexact], [y for y, inexact in pairs if not inexact]

    _outputs.caller = "formula"  # type: ignore[attr-defined]

    def _second(self, xs: list[Any], cts: list[Any], us: list[Any]) -> list[Any]:
        """The derivatives of <u, gradients> by the inputs and by the cotangents."""

        def gradients(*both: Any) -> tuple[list[Any], list[Any]]:
            inner, given = list(both[: len(xs)]), list(both[len(xs) :])
            result = self._backend.vjp(self._outputs, inner, groups=None, once=False)
            return self._filled(result.pullback(given), inner), []

        again = self._backend.vjp(gradients, [*xs, *cts], groups=None, once=False)
        result = self._filled(again.pullback(us), [*xs, *cts])
        return [*self._spread(result[: len(xs)]), *result[len(xs) :]]

    def _filled(self, found: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        zeros = self._backend.zeros_like
        return [zeros(x) if g is None else g for g, x in zip(found, xs, strict=True)]

    def _spread(self, grads: Sequence[Any]) -> list[Any]:
        """One entry for each input; None for those that are not differentiated."""
        place = dict(zip(self._active, grads, strict=True))
        return [place.get(k) for k in range(len(self._leaves))]

    def _ordered(self, outs: Sequence[Any], extras: Sequence[Any]) -> list[Any]:
        some, others = iter(outs), iter(extras)
        return [next(some) if inexact else next(others) for inexact in self._inexact]

    def _numpy(self, x: Any) -> Any:
        return None if x is None else np.asarray(self._backend.to_numpy(x))


def fingerprint(graph: PlainGraph) -> list[Any]:
    """What a run computes, by which two runs are told apart."""
    return [_mark_of(graph, node) for graph, node in graph.walk()]


def _mark_of(graph: PlainGraph, node: Any) -> tuple[Any, ...]:
    shapes = tuple(graph.values[v].shape for v in (*node.inputs, *node.outputs))
    drawn = node.operation == "random"
    said = {k: v for k, v in node.attributes.items() if not drawn and not callable(v)}
    return node.operation, shapes, tuple(sorted((k, _plain(v)) for k, v in said.items()))


def _plain(value: Any) -> str:
    array = isinstance(value, np.ndarray | np.generic)
    return f"{value.shape}{value.tobytes()!r}" if array else repr(value)
