"""`checked`: compares every derivative that gradtools takes in a block with differences of values.

    Re<J^H v, u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>  =  Re<v, J u>

What is meant to differ is left out: edits are identities on both sides, and a stop that f itself
executes (`stop_gradient`, `detach`, a `no_grad` block) keeps the value of the first run in all
others. Stops of gradtools' own, and those inside of custom functions and rules, do not.

`central_differences` compares. The modules `checked_mode` of `gradtools.torch` and `gradtools.jax`
run f at other points. While a context is open, the members of a backend that differentiate are
replaced on the instance, so an operator outside of one runs the same code as ever. Batches and sums
over chunks are loops then, so that the derivatives inside of them have values.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from gradtools.arguments.calls import Call
from gradtools.arguments.chunks import ChunkFunction
from gradtools.backend import Differentiation, FrameworkBackend, Recomputation
from gradtools.code_origin import Source, definition_of, innermost, lines_above
from gradtools.custom_rules import CustomRule
from gradtools.errors import DerivativeError
from gradtools.rules import by_key
from gradtools.testing.central_differences import DerivativeAtPoint, normal

TRACED = "traced values (jit, vmap, compile)"
UNSEEN = "stops inside of compiled code or loops, or f reads values"
NOISY = "too noisy to tell"


@dataclass
class CheckedReport:
    """What a block of `checked` compared.

    Attributes:
        compared: How many derivatives agree with differences.
        skipped: How many were not compared, by the reason.
        notes: What is no error, such as a stopped value that leaves the framework.
    """

    compared: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"checked: {self.compared} derivatives agree with differences"]
        lines += [f"  not compared: {n}, {reason}" for reason, n in self.skipped.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


class _CheckedThread(threading.local):
    """The state of this thread."""

    report: CheckedReport | None = None  # of the innermost context
    rng: Any = None
    program: Any = None  # the one that runs at other points; nothing is compared inside of it
    own = 0  # how many calls of gradtools the running code is in, since the user's function began
    taking = False  # whether a derivative of gradtools is being taken
    native = False  # whether a derivative of the framework's own, at known values, is compared


here = _CheckedThread()


@contextmanager
def set_here(**values: Any) -> Iterator[None]:
    """Sets attributes of this thread's state."""
    before = {name: getattr(here, name) for name in values}
    vars(here).update(values)
    try:
        yield
    finally:
        vars(here).update(before)


def functions_within(fun: Any) -> list[Any]:
    """The function that a backend differentiates, and those that it wraps, the user's last."""
    found = [getattr(fun, "call", fun)]
    while (inner := getattr(found[-1], "f", None) or getattr(found[-1], "fun", None)) is not None:
        found.append(inner)
    return found


class CheckedProgram:
    """f, which runs again at other points and leaves no trace; a framework's class adds how.

    Attributes:
        half: The module that runs it.
        held: f's outputs at arrays, without edits.
        pullback: The pullback at fixed cotangents.
        base: The outputs of the first run.
        edited: Whether f contains edits.
        unseen: How many operations hold stops that are not seen.
        notes: For the report; `left` and `suspects` are for an error's text.
        values: The values that f stops, and `recorded` those of the first run.
        stops: The lines at which f stops values.
        operations: The calls of operations, while these are recorded.
    """

    half: Any
    held: Callable[..., list[Any]]
    pullback: Callable[[Sequence[Any]], Callable[..., list[Any]]]
    base: list[Any]

    def __init__(self, backend: Any, fun: Any, leaves: Sequence[Any]) -> None:
        self.backend, self.fun, self.leaves = backend, fun, [*leaves]
        self.edited, self.unseen, self.at = False, 0, 0
        self.notes, self.left, self.suspects = list[str](), list[str](), list[str]()
        self.values, self.stops = list[Any](), list[Source | None]()
        self.recorded: list[Any] | None = None
        self.operations: list[Any] | None = None

    def __call__(self, points: Sequence[Any]) -> list[Any]:
        """f's outputs as NumPy arrays."""
        return self.half.numbers(self.held(*self.half.like(points, self.leaves)))

    def rounded(self, points: Sequence[Any]) -> list[Any]:
        """The points in the precision of f's arguments."""
        return self.half.numbers(self.half.like(points, self.leaves))

    def derivative(self, member: str, given: Sequence[Any]) -> Callable[..., list[Any]]:
        """The pullback ("vjp") or pushforward at fixed vectors, which is differentiable."""
        if member == "vjp":
            return self.pullback(given)
        run: Any = lambda *xs: (self.held(*xs), [])
        along = partial(self.half.like, given)
        if member == "linearize":
            return lambda *xs: self.backend.linearize(run, list(xs))[2](along(xs))
        return lambda *xs: self.backend.jvp(run, list(xs), along(xs))[2]

    def derivative_at(self, member: str, points: Any, given: Sequence[Any]) -> list[Any]:
        """A derivative as NumPy arrays."""
        xs = self.half.like(points, self.leaves)
        return self.half.numbers(self.derivative(member, given)(*xs))

    def called(self, name: str, fn: Callable[..., Any], leaves: Sequence[Any]) -> None:
        """A custom rule is called."""

    def wrong_operation(self, rng: Any) -> str:
        """The first operation of f whose own derivative is wrong, in words; else what may be."""
        calls = self.operations = list[Any]()
        self.held(*self.leaves)
        self.operations = None
        for word, inner, outer in _ORDERS:
            for name, line, fn, xs in calls:
                try:
                    for member in filter(None, (inner, outer)):
                        program, at = self.half.plain(self.backend, fn, xs), self.half.numbers(xs)
                        given = [normal(rng, y) for y in (program.base if member == "vjp" else at)]
                        fn = program.derivative(member, given)
                    if DerivativeAtPoint(program, member, at, given, rng).verdict() == "differs":
                        return f"The {word}derivative of {name} is wrong by itself ({line})."
                except Exception:  # an operation that cannot be tried alone is not named
                    continue
        return f"f holds {', '.join(self.suspects)}." if self.suspects else ""


_ORDERS = (
    ("", "", "vjp"),
    ("second ", "vjp", "vjp"),
    ("forward-mode ", "", "jvp"),
    ("reverse-over-forward ", "jvp", "vjp"),
)


def _text(caller: str, fun: Any, c: DerivativeAtPoint) -> str:
    first, within = getattr(fun, "first", 0), functions_within(fun)
    paths = getattr(within[0], "paths", [f"leaf {i}" for i in range(len(c.xs))])[first:]
    words = f"{c.slope:.6g}, and central differences (step {c.step:.1g}) give {c.difference:.6g}"
    wrong = [path for i, path in enumerate(paths[: len(c.xs)]) if c.ask(i) == "differs"]
    name = getattr(within[-1], "__qualname__", type(within[-1]).__name__)
    return " ".join(
        [
            f"{caller}: the derivative with respect to {', '.join(wrong[:3]) or 'its arguments'}",
            f"is not that of f's values: along a random direction it is {words}. f is {name}",
            f"({definition_of(within[-1])}), differentiated at {innermost(lines_above(1))}.",
            *c.program.left,
            c.program.wrong_operation(c.rng),
        ]
    ).rstrip()


# --- the members of a backend that are replaced --------------------------------------------------


class _CheckedMembers:
    """The replaced members of one backend, which consult this thread's state."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        _replace(backend, "checked", self)
        for name in _MEMBERS:
            if member := getattr(backend, name, None):
                checked = getattr(self, f"_{name}", None) or partial(self._pushing, name)
                _replace(backend, name, partial(self._called, checked, member))

    @cached_property
    def half(self) -> Any:
        return self.backend.submodule("checked_mode", "checked")

    def _called(self, checked: Any, member: Any, *args: Any, **kwargs: Any) -> Any:
        if here.report is None:
            return member(*args, **kwargs)
        return checked(partial(self.own, member), *args, **kwargs)

    def own(self, member: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a member as code of gradtools, whose stops are not the user's."""
        with set_here(own=here.own + 1), self.half.scope(True):
            return member(*args, **kwargs)

    def program(self, fun: Any, leaves: Sequence[Any], captures: bool = False) -> Any:
        """f as a program that runs again, recorded at the leaves; None if it is not compared."""
        report = here.report
        if here.program is not None or report is None or (here.taking and self.half.REHEARSES):
            return None
        if self.half.traced(leaves) or not (leaves or captures):
            report.skipped[TRACED] += 1
            return None
        try:
            return self.half.program_of(self.backend, fun, leaves, captures)
        except DerivativeError:
            raise
        except Exception as error:  # the operator's own run raises it, if it is not of a second run
            report.notes.append(f"f could not run again: {type(error).__name__}: {error}")
            return None

    def compare(self, caller: str, program: Any, fun: Any, given: Any, known: Any, to: str) -> None:
        """Compares one derivative, and raises a `DerivativeError` if it differs.

        known: The derivative that was taken at the vectors `given`; None: the program's own.
        """
        report, half = here.report, self.half
        if program is None or report is None or here.program is not None:
            return
        if known is not None:
            if half.traced([*given, *known]):
                report.skipped[TRACED] += 1
                return
            given, known = half.numbers(given), half.numbers(known)
        with set_here(program=program, own=0):
            xs = half.numbers(program.leaves)
            found = DerivativeAtPoint(program, to, xs, given, here.rng, known)
            verdict = found.verdict()
            if verdict == "differs" and not program.unseen:
                raise DerivativeError(_text(caller, fun, found))
        if verdict == "agrees":
            report.compared += 1
        else:
            report.skipped[UNSEEN if program.unseen else NOISY] += 1
        report.notes += [note for note in program.notes if note not in report.notes]

    def _comparing(self, program: Any, fun: Any, linear: Any, member: str) -> Any:
        """A linear map whose results are compared."""

        def run(native: Any, given: Any) -> Any:
            result, caller = self.own(native, given), getattr(fun, "caller", member)
            self.compare(caller, program, fun, given, result, member)
            return result

        return self.backend.linear_map(run, linear)

    def _vjp(self, run: Any, fun: Any, leaves: list[Any], **how: Any) -> Any:
        program = self.program(fun, leaves)
        with set_here(taking=True):
            result = run(fun, leaves, **how)
        transposed, compared = result.transposed, partial(self._comparing, program, fun)
        result.pullback = compared(result.pullback, "vjp")
        result.transposed = lambda: (push := transposed()) and compared(push, "linearize")
        return result

    def _pushing(self, member: str, run: Any, fun: Any, leaves: list[Any], *given: Any) -> Any:
        program = self.program(fun, leaves)
        with set_here(taking=True):
            outs, extras, result = run(fun, leaves, *given)
        if member == "linearize":
            return outs, extras, self._comparing(program, fun, result, member)
        pairs = zip(*given, result, strict=True) if member == "jvps" else [(*given, result)]
        for tangents, pushed in pairs:
            self.compare(getattr(fun, "caller", "jvp"), program, fun, tangents, pushed, "jvp")
        return outs, extras, result

    def _map_batches(self, run: Any, f: Any, batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Compares the first rows one by one, and with those of the batch."""
        if here.program is not None or self.half.traced(batch) or not len(batch[0]):
            return run(f, batch, *args, **kwargs)
        first = [x[:_MOST_ROWS] for x in batch]
        alone = lambda: self.half.numbers(Differentiation.map_batches(self.backend, f, first, None))
        with self.half.unchanged():
            rows = alone()
            with set_here(report=None):
                drawn = any((x != y).any() for x, y in zip(rows, alone(), strict=True))
        with set_here(report=None):
            result = run(f, batch, *args, **kwargs)
        for x, y in zip(rows, self.half.numbers(result), strict=True):
            if not drawn and not np.allclose(x, y[: len(x)], 0.01, 0.01 * np.abs(x).max(initial=0)):
                raise DerivativeError("vmap: a row of a batch differs from the row alone.")
        return result

    def _sum_chunks(self, run: Any, chunks: Any, *weigh: Any) -> Any:
        arrays = [*(x for x, _ in chunks.splits), *filter(self.backend.is_array, chunks.shared)]
        if self.half.REHEARSES and not self.half.traced(arrays):
            return Recomputation.sum_chunks(self.backend, chunks)
        return run(chunks, *weigh)

    def _apply_rule(self, run: Any, rule: Any, *xs: Any) -> Any:
        edit = getattr(here.program, "edit", None) if rule.reaches == "identity" else None
        return edit(rule, xs) if edit else run(rule, *xs)

    def _apply_rule_by_key(self, run: Any, key: str, *xs: Any) -> Any:
        return self._apply_rule(lambda rule, *xs: run(key, *xs), by_key(key), *xs)

    def _scaled(self, run: Any, x: Any, factor: float) -> Any:
        return run(x, factor) if here.program is None else None  # then it is a rule

    # --- parts through which a backward pass of the framework's own goes

    def native(self, caller: str, f: Any, run: Any, args: Any, kwargs: Any) -> None:
        """Compares `run(*args, **kwargs)`, which the framework itself may differentiate."""
        if here.program is not None or here.report is None or here.taking or here.own:
            return
        at, leaves = self.flat(run, args, kwargs)
        with self.half.native(leaves) as (values, moving):

            def fun(*xs: Any) -> tuple[list[Any], list[Any]]:
                given, is_inexact = iter(xs), self.backend.is_inexact
                outs = at(*[next(given) if m else x for x, m in zip(values, moving, strict=True)])
                return [y for y in outs if self.backend.is_array(y) and is_inexact(y)], []

            fun.f = getattr(f, "f", f)  # type: ignore[attr-defined]
            differentiated = [x for x, m in zip(values, moving, strict=True) if m]
            if program := values and self.program(fun, differentiated, captures=True):
                given = [normal(here.rng, y) for y in program.base]
                self.compare(caller, program, fun, given, None, "vjp")

    def flat(self, run: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """`run(*args, **kwargs)` as a function of leaves that returns leaves, and its leaves."""
        leaves, treedef = self.backend.flatten((args, kwargs))

        def at(*xs: Any) -> list[Any]:
            args, kwargs = self.backend.unflatten(treedef, list(xs))
            return list(self.backend.flatten(run(*args, **kwargs))[0])

        return at, leaves

    def _run_chunks(self, run: Any, chunks: Any, *rest: Any) -> Any:
        def part(splits: Any, lists: Any, shared: Any) -> Any:
            splits = [(x, axis) for x, (_, axis) in zip(splits, chunks.splits, strict=True)]
            outs = run(replace(chunks, splits=splits, lists=lists, shared=shared), *rest)
            return outs[0] if isinstance(outs, tuple) else outs  # without carries

        arrays = [x for x, _ in chunks.splits], chunks.lists, chunks.shared
        self.native(chunks.caller, chunks.call, part, arrays, {})
        return run(chunks, *rest)

    _run_frozen = _run_chunks

    def _run_checkpointed(self, run: Any, f: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.native("checkpoint", f, partial(run, f), args, kwargs)
        return run(f, *args, **kwargs)


_MEMBERS = (
    *("vjp", "jvp", "jvps", "linearize", "map_batches", "apply_rule", "apply_rule_by_key"),
    *("scaled", "run_chunks", "run_frozen", "run_checkpointed", "sum_chunks"),
)
_MOST_ROWS = 16


# --- the context ---------------------------------------------------------------------------------

_lock, _open, _undo = threading.Lock(), [0], ExitStack()


def _replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until the last context is closed."""
    before = [vars(owner)[name]] if name in vars(owner) else []
    setattr(owner, name, value)
    _undo.callback(lambda: setattr(owner, name, *before) if before else delattr(owner, name))


def _users_call(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that runs the user's function."""
    if here.report is None:
        return run(self, *args, **kwargs)
    with set_here(own=0), self.backend.checked.half.scope(False):
        return run(self, *args, **kwargs)


def _rule_call(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a custom rule."""
    if here.report is None or here.own:
        return run(self, *args, **kwargs)
    members = self._backend.checked
    called = partial(members.own, run, self)
    if here.program is not None:
        here.program.called(f"the rule {self.__name__}", *members.flat(called, args, kwargs))
    members.native(self.__name__, self.fun, called, args, kwargs)
    return called(*args, **kwargs)


def _replace_members() -> None:
    for cls, call in ((Call, _users_call), (ChunkFunction, _users_call), (CustomRule, _rule_call)):
        bound: Any = partial(call, cls.__call__)
        put: Any = lambda self, *args, bound=bound, **kwargs: bound(self, *args, **kwargs)
        _replace(cls, "__call__", put)
    for backend in FrameworkBackend.instances:
        _CheckedMembers(backend)
    FrameworkBackend.on_creation.append(_CheckedMembers)  # type: ignore[arg-type]
    _undo.callback(FrameworkBackend.on_creation.clear)


@contextmanager
def checked(seed: int = 0) -> Iterator[CheckedReport]:
    """A context that compares every derivative that gradtools takes in it with differences.

    The comparison is with central differences of f's values, along one random direction, at two
    step sizes, with random streams and buffers put back. So f runs several times. A custom function
    or hook that loses a derivative is found, a rule whose bwd is not its derivative, a wrong
    formula of the framework, and data that leaves the framework, at any depth of nesting. A
    backward pass of the framework's own is compared where it goes through a custom rule or through
    `chunked`, `frozen` or `checkpoint`.

    What is meant to differ is left out: gradtools' edits, and what f itself stops by
    `stop_gradient`, `detach` or `no_grad`. A straight-through estimator or a reversal by one's own
    custom function is an error; use `straight_through` and `reverse_gradient`. Derivatives of
    traced values (`jit`, `vmap`, compiled code) are counted as skipped.

    The context concerns its own thread, and may be nested. Outside of it nothing is slower.
    ``pytest --gradtools-checked`` runs each test in it, ``gradtools checked`` a script.

    Args:
        seed: Of the random directions.

    Yields:
        A `CheckedReport`: how many derivatives were compared and skipped, and notes.

    Raises:
        DerivativeError: A derivative is not that of f's values. It names the operator, the
            argument, the lines, both numbers, and the operation where it can be found.

    Example:
        >>> from gradtools.testing import checked
        >>> with checked() as report:
        ...     g = gt.grad(lambda x: (x ** 3).sum())(gt.asarray(np.float32([1.0, 2.0])))
        >>> report.compared
        1

    Source: Griewank and Walther, Evaluating derivatives, 2008, section 3.1 (the dot-product test).
    """
    with _lock:
        _open[0] += 1
        if _open[0] == 1:
            _replace_members()
    report = CheckedReport()
    start = {"own": 0, "taking": False, "program": None}
    try:
        with set_here(report=report, rng=np.random.default_rng(seed), **start):
            yield report
    finally:
        with _lock:
            _open[0] -= 1
            if not _open[0]:
                _undo.close()


def lines_of_stops(backend: Any, fun: Any, leaves: Sequence[Any]) -> list[Source | None]:
    """The lines at which fun stops values, if its derivative is right with these held, else none.

    fun: As a backend takes it: a function of leaves that returns `(outs, extras)`.
    """
    rng = np.random.default_rng(0)
    with checked():
        half = backend.submodule("checked_mode", "checked")
        program = half.program_of(backend, fun, leaves, False)
        given = [normal(rng, y) for y in program.base]
        with set_here(program=program):
            found = DerivativeAtPoint(program, "vjp", half.numbers(program.leaves), given, rng)
            return program.stops if found.verdict() == "agrees" else []
