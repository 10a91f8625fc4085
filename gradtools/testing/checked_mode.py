"""`checked`: compares every derivative that gradtools computes in a block with finite differences.

    Re<J^H v, u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>  =  Re<v, J u>

Intended edits are not reported: in a comparison, gradient edits are replaced by identities, and a
value whose gradient f itself stops (`stop_gradient`, `detach`, a `no_grad` block) is replaced in
later runs by its value from the first run. Values whose gradients are stopped by gradtools or
inside custom functions or rules are recomputed in each run. A stopped value can also be an operand
of a custom rule, and the rule can compute the derivative of a function in which this value varies
(as in a linear solver with factors of a stopped matrix); a hook of f can also compute such a
derivative. In these cases, a derivative is wrong only if it differs from finite differences both
with stopped values constant and with stopped values recomputed. If a derivative is wrong, the
derivatives of f's intermediate values are compared in the same way to locate the first operation
with a wrong derivative.

The module `central_differences` implements the comparison. The modules `checked_mode` of
`gradtools.torch` and `gradtools.jax` run f at other points. While a `checked` context is active,
the methods of a backend instance that compute derivatives are replaced; outside of a context, the
operators run unchanged.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any

import numpy as np

from gradtools.arguments.calls import Call
from gradtools.arguments.checks import whole_or_none
from gradtools.arguments.chunks import ChunkFunction
from gradtools.backend import FrameworkBackend, Recomputation
from gradtools.boundary import user_facing
from gradtools.code_origin import Source, definition_of, innermost, lines_above
from gradtools.custom_rules import CustomRule
from gradtools.errors import DerivativeError, GradtoolsError
from gradtools.rules import by_key
from gradtools.testing.central_differences import DerivativeComparison, dot

TRACED = "traced values (jit, vmap, compile)"
UNSEEN = "f may stop gradients in compiled code or loops, or f cannot be traced"
NOISY = "inconclusive because of rounding noise"
_MOST_ROWS = 16  # maximum number of rows of a batch that are compared


@dataclass
class CheckedReport:
    """The results of the comparisons in a `checked` block.

    Attributes:
        compared: The number of derivatives that agree with finite differences.
        skipped: Maps each reason to the number of derivatives that were not compared.
        notes: Remarks that are not errors, for example that f could not run again.
    """

    compared: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"checked: {self.compared} derivatives agree with finite differences"]
        lines += [f"  not compared: {n}, {reason}" for reason, n in self.skipped.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


class _CheckedThread(threading.local):
    """The thread-local state of `checked`.

    Attributes:
        report: The report of the innermost context.
        program: The program that is evaluated for a comparison; no derivatives are compared while
            it runs.
        own: Whether code of gradtools is running, rather than the user's function.
        taking: Whether gradtools is computing a derivative.
        native: Whether the running comparison checks a derivative that the framework computes.
    """

    report: CheckedReport | None = None
    rng: Any = None
    program: Any = None
    own = False
    taking = False
    native = False


here = _CheckedThread()


@contextmanager
def set_here(**values: Any) -> Iterator[None]:
    """Context manager that temporarily sets attributes of the thread-local state."""
    before = {name: getattr(here, name) for name in values}
    vars(here).update(values)
    try:
        yield
    finally:
        vars(here).update(before)


def functions_within(fun: Any) -> list[Any]:
    """Returns the differentiated function and the functions that it wraps, outermost first."""
    found = [getattr(fun, "call", fun)]
    while (inner := getattr(found[-1], "f", None) or getattr(found[-1], "fun", None)) is not None:
        found.append(inner)
    return found


# --- a function that runs again ------------------------------------------------------------------


class CheckedProgram:
    """Runs f again at other points without side effects; each framework has a subclass.

    Attributes:
        half: The framework's `checked_mode` module.
        run: A function that returns f's outputs at the given arrays, without gradient edits.
        at: A context manager that yields f's array arguments at a given point; f runs inside of
            this context.
        eps: The largest machine epsilon of the dtypes that f uses.
        unseen: The number of operations of f in which a stopped gradient cannot be detected.
        notes: Notes for the report.
        hooks: A dictionary whose keys describe the gradient hooks of f and of its parameters.
        values: The values whose gradients f stops in a run; `recorded` contains the values of the
            first run.
        stops_reach_rules: Whether a custom rule or a hook may use a value whose gradient f stops.
        recompute: Whether the stopped values are recomputed in later runs.
        seen: The intermediate values of f, with operation names and lines; `held` returns the first
            `count` of these values except for the first `skip`, or their derivative if `kind` is
            "vjp" or "jvp".
        lost: Describes operations of f whose results have no derivative, such as `item`, each with
            the length of `seen` at the operation.
    """

    half: Any
    run: Callable[..., list[Any]]
    at: Callable[[Sequence[Any]], AbstractContextManager[list[Any]]]

    def __init__(self, backend: Any, member: str, fun: Any, leaves: Sequence[Any]) -> None:
        self.backend, self.member, self.fun, self.leaves = backend, member, fun, [*leaves]
        self.eps, self.unseen, self.place = 0.0, 0, 0
        self.notes, self.hooks = list[str](), dict[str, None]()
        self.values = list[Any]()
        self.recorded: list[Any] | None = None
        self.stops_reach_rules = self.recompute = False
        self.skip = 0
        self.count: int | None = None
        self.kind = ""
        self.seen, self.lost = list[tuple[str, str, Any]](), dict[str, int]()

    def held(self, *xs: Any) -> list[Any]:
        """Returns f's outputs, the first `count` intermediate values, or a derivative of either."""
        run: Any = lambda *xs: (self._values(*xs), [])
        if self.kind == "jvp":
            return list(self.backend.jvp(run, [*xs], [*xs])[2])
        if self.kind == "vjp":
            result = self.backend.vjp(run, [*xs], groups=None, once=False)
            return list(self.backend.filled(result.pullback(result.outs), xs))
        return self._values(*xs)

    def _values(self, *xs: Any) -> list[Any]:
        self.place, self.seen, self.lost = 0, [], {}
        outs = self.run(*xs)
        seen = self.seen[self.skip : self.count]
        return outs if self.count is None else [y for _, _, y in seen]

    def __call__(self, points: Sequence[Any]) -> list[Any]:
        """Returns the results of `held` at the given points as NumPy arrays."""
        with self.at(points) as xs:
            return self.numbers(self.held(*xs))

    def numbers(self, xs: Sequence[Any]) -> list[Any]:
        """Converts arrays to NumPy arrays in double precision."""
        narrow = map(self.backend.to_numpy, xs)
        return [x.astype(np.result_type(x.dtype, np.float64)) for x in narrow]

    def rounded(self, points: Sequence[Any]) -> list[Any]:
        """Rounds the points to the precision of f's arguments."""
        return self.numbers(self.half.like(points, self.leaves))

    def slope(self, points: Any, vs: Sequence[Any], us: Sequence[Any]) -> tuple[float, float]:
        """Returns Re<vs, J us> and the sum of the absolute values of its terms.

        The backend method `member` computes J us or J^H vs at the given points.
        """
        like = self.half.like
        run: Any = lambda *xs: (self.held(*xs), [])
        with self.at(points) as xs:
            if self.member == "vjp":
                return dot(self.numbers(self.pull(run, xs, vs)), us)
            if self.member == "linearize":
                return dot(vs, self.numbers(self.backend.linearize(run, xs)[2](like(us, xs))))
            return dot(vs, self.numbers(self.backend.jvp(run, xs, like(us, xs))[2]))

    def pull(self, run: Any, xs: list[Any], vs: Sequence[Any]) -> list[Any]:
        """Applies the pullback of `run` at xs to the cotangents vs, which are NumPy arrays."""
        result = self.backend.vjp(run, xs, groups=None, once=True)
        return list(self.backend.filled(result.pullback(self.half.like(vs, result.outs)), xs))

    def see(self, name: str, line: Source | None, ys: Sequence[Any]) -> None:
        """Appends the outputs of an operation inside of f to `seen` if `count` is set."""
        if self.count is not None:
            self.seen += [(name, f" ({line})" if line else "", y) for y in ys]

    def comparison(self) -> DerivativeComparison:
        """Returns a new `DerivativeComparison` at f's arguments."""
        return DerivativeComparison(self, self.numbers(self.leaves), here.rng)

    def compared(self) -> tuple[str, DerivativeComparison]:
        """Returns the verdict and the comparison in which stopped values are constant.

        If a derivative differs and custom rules or hooks can use stopped values, the method returns
        the verdict of a second comparison, in which stopped values are recomputed. If f has no
        arguments, the verdict is empty.
        """
        found = self.comparison()
        verdict = found.verdict() if self.leaves else ""
        if verdict == "differs" and self.stops_reach_rules:
            self.recompute = True
            try:
                verdict = self.comparison().verdict()
            finally:
                self.recompute = False
        return verdict, found

    def given_to_rule(self, xs: Sequence[Any]) -> None:
        """Receives the array arguments of a custom rule of gradtools; does nothing by default."""

    def first_wrong(self) -> str:
        """Describes the first value inside of f with a wrong derivative, found by bisection.

        An operation of the framework has a wrong derivative only if it reads a value that has left
        the framework. Many such values are only logged, so the bisection excludes these values.
        In the sum over many values, a small error can vanish, so the last values are also compared
        one by one.
        """

        def differs(k: int, skip: int = 0) -> bool:  # a wrong derivative may be inconclusive
            self.skip, self.count = skip, k + 1
            return all(self.compared()[0] != "agrees" for _ in range(2))

        texts = list[str]()
        for word, kind in _ORDERS:
            try:
                self.skip, self.count, self.kind = 0, sys.maxsize, ""
                self(self.numbers(self.leaves))
                found, self.kind = [(name, line) for name, line, _ in self.seen], kind
                lost = self.lost
                k = bisect_left(range(len(found)), True, key=differs)
                while k and differs(k - 1, k - 1):
                    k -= 1
            except Exception:  # f has no derivative of this kind
                continue
            for name, line in found[k : k + 1]:
                earlier = [text for text, place in lost.items() if place <= k]
                if earlier and not name.startswith(CUSTOM):
                    name, line = " or ".join(earlier), ""
                texts.append(f"The {word}derivative of {name}{line} is the first wrong derivative.")
                if not name.startswith(UNNAMED):
                    return " ".join([texts[-1], *self.hooks])
        return " ".join([*texts[:1], *self.hooks])


UNNAMED = ("an argument of ", "f's output")
CUSTOM = ("the rule ", "the autograd.Function ", "a backward hook ")
_ORDERS = (("", ""), ("second ", "vjp"), ("reverse-over-forward ", "jvp"))


def _text(caller: str, fun: Any, program: Any, c: DerivativeComparison) -> str:
    first, within = getattr(fun, "first", 0), functions_within(fun)
    paths = getattr(within[0], "paths", [f"leaf {i}" for i in range(len(c.xs))])[first:]
    words = f"{c.slope:.6g}, and central differences (step {c.step:.1g}) give {c.difference:.6g}"
    wrong = [path for i, path in enumerate(paths[: len(c.xs)]) if c.compare(i) == "differs"]
    name = getattr(within[-1], "__qualname__", type(within[-1]).__name__)
    return (
        f"{caller}: the derivative with respect to {', '.join(wrong[:3]) or 'its arguments'} is "
        f"inconsistent with f's values: along a random direction it is {words}. f is {name} "
        f"({definition_of(within[-1])}), differentiated at {innermost(lines_above(1))}. "
        f"{program.first_wrong()}"
    ).rstrip()


# --- the members of a backend that are replaced --------------------------------------------------


class _CheckedMembers:
    """Replacements for the methods of one backend that compute derivatives."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        _replace(backend, "checked", self)
        for name in _MEMBERS:
            if member := getattr(backend, name, None):
                checked = getattr(self, f"_{name}", None) or partial(self._differentiating, name)
                _replace(backend, name, partial(self._called, checked, member))

    @cached_property
    def half(self) -> Any:
        return self.backend.submodule("checked_mode", "checked")

    def _called(self, checked: Any, member: Any, *args: Any, **kwargs: Any) -> Any:
        if here.report is None:
            return member(*args, **kwargs)
        return checked(partial(self.own, member), *args, **kwargs)

    def own(self, member: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a backend method; gradients stopped in the call do not count as stopped by f."""
        with set_here(own=True), self.half.scope(True):
            return member(*args, **kwargs)

    def check(
        self, caller: str, member: str, fun: Any, leaves: Sequence[Any], captures: bool = False
    ) -> None:
        """Raises `DerivativeError` if the derivative of fun differs from finite differences.

        captures: Whether arrays that fun captures are also differentiated.
        """
        report: Any = here.report
        if here.program is not None:
            return
        if self.half.traced(leaves) or not (leaves or captures):
            report.skipped.update([TRACED] * (not here.taking))
            return
        try:
            program = self.half.HeldProgram(self.backend, member, fun, leaves, captures)
            verdict, found = program.compared()
        except DerivativeError:
            raise
        except Exception as error:
            # The operator raises the same error, unless only the second run of f fails.
            report.notes.append(f"f could not run again: {type(error).__name__}: {error}")
            return
        if verdict == "differs" and not program.unseen:
            raise DerivativeError(_text(caller, fun, program, found))
        if verdict == "agrees":
            report.compared += 1
        elif verdict:
            report.skipped[UNSEEN if program.unseen else NOISY] += 1
        report.notes += [note for note in program.notes if note not in report.notes]

    def _differentiating(
        self, member: str, run: Any, fun: Any, leaves: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.check(getattr(fun, "caller", member), member, fun, leaves)
        with set_here(taking=True):
            return run(fun, leaves, *args, **kwargs)

    def _map_batches(self, run: Any, f: Any, batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Compares derivatives inside of f by running f on each of the first rows of the batch."""
        if here.program is None and not self.half.traced(batch):
            with self.half.unchanged():
                for row in zip(*(x[:_MOST_ROWS] for x in batch), strict=True):
                    f(*row)
        with set_here(report=None):
            return run(f, batch, *args, **kwargs)

    def _sum_chunks(self, run: Any, chunks: Any, *weigh: Any) -> Any:
        arrays = [*(x for x, _ in chunks.splits), *filter(self.backend.is_array, chunks.shared)]
        if self.backend.weighs_sums or self.half.traced(arrays):
            return run(chunks, *weigh)
        return Recomputation.sum_chunks(self.backend, chunks)  # loop over concrete chunks

    def _apply_rule(self, run: Any, rule: Any, *xs: Any) -> Any:
        edit = getattr(here.program, "edit", None) if rule.reaches == "identity" else None
        return edit(rule, xs) if edit else run(rule, *xs)

    def _apply_rule_by_key(self, run: Any, key: str, *xs: Any) -> Any:
        return self._apply_rule(lambda rule, *xs: run(key, *xs), by_key(key), *xs)

    def _edited(self, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if here.program is None else None  # None means: apply the rule

    # --- parts that the framework itself differentiates

    def native(self, caller: str, f: Any, run: Any, *args: Any, **kwargs: Any) -> None:
        """Checks the derivative of `run(*args, **kwargs)`, which the framework may compute."""
        if here.program is not None or here.report is None or here.taking or here.own:
            return
        leaves, treedef = self.backend.flatten((args, kwargs))
        with self.half.native(leaves) as (values, moving):

            def fun(*xs: Any) -> tuple[list[Any], list[Any]]:
                new, is_inexact = iter(xs), self.backend.is_inexact
                both = [next(new) if m else x for x, m in zip(values, moving, strict=True)]
                args, kwargs = self.backend.unflatten(treedef, both)
                outs = self.backend.flatten(run(*args, **kwargs))[0]
                with set_here(own=True):
                    return [y for y in outs if self.backend.is_array(y) and is_inexact(y)], []

            fun.f = getattr(f, "f", f)  # type: ignore[attr-defined]
            if values:
                self.check(caller, "vjp", fun, [*compress(values, moving)], captures=True)

    def _run_chunks(self, run: Any, chunks: Any, *rest: Any) -> Any:
        def part(splits: Any, lists: Any, shared: Any) -> Any:
            splits = [(x, axis) for x, (_, axis) in zip(splits, chunks.splits, strict=True)]
            outs = run(replace(chunks, splits=splits, lists=lists, shared=shared), *rest)
            return outs[0] if isinstance(outs, tuple) else outs  # without carries

        arrays = [x for x, _ in chunks.splits], chunks.lists, chunks.shared
        self.native(chunks.caller, chunks.call, part, *arrays)
        return run(chunks, *rest)

    _run_frozen = _run_chunks

    def _apart(self, run: Any, /, *args: Any) -> Any:
        return run(*args)

    def _run_checkpointed(self, run: Any, f: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.native("checkpoint", f, partial(run, f), *args, **kwargs)
        return run(f, *args, **kwargs)


_MEMBERS = (
    *("vjp", "jvp", "jvps", "linearize", "map_batches", "apply_rule", "apply_rule_by_key"),
    *("apart", "edited", "run_chunks", "run_frozen", "run_checkpointed", "sum_chunks"),
)


# --- the context ---------------------------------------------------------------------------------

_lock, _open, _undo = threading.Lock(), [0], ExitStack()


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute of `owner` until the last `checked` context exits."""
    before = [vars(owner)[name]] if name in vars(owner) else []
    setattr(owner, name, value)
    _undo.callback(lambda: setattr(owner, name, *before) if before else delattr(owner, name))


def _users_call(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's function, in which a `checked` context compares derivatives."""
    if here.report is None:
        return run(self, *args, **kwargs)
    with set_here(own=False), self.backend.checked.half.scope(False):
        return run(self, *args, **kwargs)


def _rule_call(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a custom rule and, in a `checked` context, compares the rule's derivatives."""
    if here.report is None or here.own:
        return run(self, *args, **kwargs)
    members = self._backend.checked
    members.native(self.__name__, self.fun, partial(members.own, run, self), *args, **kwargs)
    if here.program is not None:
        here.program.given_to_rule(self._backend.flatten((args, kwargs))[0])
    result = members.own(run, self, *args, **kwargs)
    if here.program is not None:
        line, ys = innermost(lines_above(1)), self._backend.flatten(result)[0]
        here.program.see(f"the rule {self.__name__}", line, ys)
    return result


def _replace_members() -> None:
    for cls, call in ((Call, _users_call), (ChunkFunction, _users_call), (CustomRule, _rule_call)):
        bound: Any = partial(call, cls.__call__)
        put: Any = lambda self, *args, bound=bound, **kwargs: bound(self, *args, **kwargs)
        _replace(cls, "__call__", put)
    for backend in FrameworkBackend.instances:
        _CheckedMembers(backend)
    FrameworkBackend.on_creation.append(_CheckedMembers)  # type: ignore[arg-type]
    _undo.callback(FrameworkBackend.on_creation.clear)


@user_facing
def checked(seed: int = 0) -> AbstractContextManager[CheckedReport]:
    """Context manager that compares gradtools' derivatives with finite differences.

    Derivatives are compared with central differences of f's values, for a random tangent and a
    random cotangent. f runs several times; random generators and buffers are restored after each
    run. The check finds custom functions and hooks that drop a derivative, custom rules with a
    wrong bwd, wrong derivative formulas of the framework, and data that leaves the framework (for
    example through `item()`), at any depth of nesting. If the framework itself computes the
    gradient, as in ``loss.backward()``, only custom rules and calls of `chunked`, `frozen` and
    `checkpoint` are compared.

    Two kinds of intended differences are not reported: gradient edits of gradtools, and gradients
    that f itself stops with `stop_gradient`, `detach` or `no_grad`. A straight-through estimator or
    gradient reversal in your own custom function is reported as an error; use `straight_through` or
    `reverse_gradient`. Derivatives of traced values (`jit`, `vmap`, compiled code) are counted as
    skipped.

    The context applies to the current thread only and can be nested. ``pytest --gradtools-checked``
    runs each test in a `checked` context, and ``gradtools checked`` runs a script in one context.

    Args:
        seed: The seed of the random directions.

    Returns:
        A context manager that returns a `CheckedReport`, with the numbers of compared and skipped
        derivatives, and notes.

    Raises:
        DerivativeError: A derivative is inconsistent with f's values. The error names the operator,
            the argument, the source lines, both values and, if possible, the operation.
        GradtoolsError: seed is a function or a string.

    Example:
        >>> from gradtools.testing import checked
        >>> with checked() as report:
        ...     g = gt.grad(lambda x: (x ** 3).sum())(gt.asarray(np.float32([1.0, 2.0])))
        >>> report.compared
        1

    Source: Griewank and Walther, Evaluating derivatives, 2008, section 3.1 (the dot-product test).
    """
    if callable(seed) or isinstance(seed, str):
        came = repr(seed) if isinstance(seed, str) else "a function"
        raise GradtoolsError(
            f"checked: seed is {came}, expected an integer; write `with checked():` around the "
            "call."
        )
    return _checking(whole_or_none("checked", "seed", seed, 0))


@contextmanager
def _checking(seed: int | None) -> Iterator[CheckedReport]:
    with _lock:
        _open[0] += 1
        if _open[0] == 1:
            _replace_members()
    report = CheckedReport()
    start = {"own": False, "taking": False, "program": None}
    try:
        with set_here(report=report, rng=np.random.default_rng(seed), **start):
            yield report
    finally:
        with _lock:
            _open[0] -= 1
            if not _open[0]:
                _undo.close()
