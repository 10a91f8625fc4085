"""`checked`: compares every derivative that gradtools takes in a block with differences of values.

For a pullback at cotangents v, and a pushforward along a tangent u, along one random direction

    Re<J^H v, u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>  =  Re<v, J u>

at two step sizes h, and where these disagree at a nearby point. What is meant to differ is left
out: edits are identities on both sides, and a stop that f itself executes (`stop_gradient`,
`detach`, a `no_grad` block) keeps the value of the first run in all others. Stops of gradtools'
own, and those inside of custom functions and rules, do not. `gradtools.torch.checked_mode` and
`gradtools.jax.checked_mode` run f.

The members of a backend that differentiate are replaced on the instance while a context is open,
so an operator outside of one runs the same code as ever.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from gradtools.arguments.calls import Call
from gradtools.arguments.chunks import ChunkFunction
from gradtools.backend import FrameworkBackend, Recomputation
from gradtools.code_origin import definition_of, innermost, lines_above
from gradtools.custom_rules import CustomRule
from gradtools.errors import DerivativeError
from gradtools.rules import by_key
from gradtools.testing.central_differences import Answer, Question, ask, judge, normal

TRACED = "traced values (jit, vmap, compile)"
UNSEEN = "stops inside of compiled code or loops, or f reads values"
NOISY = "too noisy to tell"
_MOST_ROWS = 16


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


here = _CheckedThread()


class Streams:
    """The random streams of Python and NumPy; each half adds those of its framework."""

    def state(self) -> Any:
        """Where they are."""
        return np.random.get_state(), random.getstate()  # noqa: NPY002 - the stream that f may use

    def restore(self, state: Any) -> None:
        """Puts them back."""
        np.random.set_state(state[0])  # noqa: NPY002 - as above
        random.setstate(state[1])


@contextmanager
def set_here(**values: Any) -> Iterator[None]:
    """Sets attributes of this thread's state."""
    before = {name: getattr(here, name) for name in values}
    vars(here).update(values)
    try:
        yield
    finally:
        vars(here).update(before)


class CheckedProgram:
    """f, which runs again at other points; a half adds `held`, `pullback` and `hold`.

    Attributes:
        edits: Whether gradtools' edits are made, and `edited` whether f holds any.
        unseen: How many operations hold stops that are not seen.
        notes: For the report; `left` and `suspects` are for an error's text.
        values: The values that f stops, and `recorded` those of the first run.
        operations: The calls of operations, while these are recorded.
    """

    half: Any

    def __init__(self, fun: Any, leaves: Sequence[Any], edits: bool = True) -> None:
        self.fun, self.leaves, self.edits, self.edited, self.unseen = (
            fun,
            [*leaves],
            edits,
            False,
            0,
        )
        self.notes, self.left, self.suspects = list[str](), list[str](), list[str]()
        self.values, self.at = list[Any](), 0
        self.recorded: list[Any] | None = None
        self.operations: list[Any] | None = None

    def __call__(self, points: Sequence[Any]) -> list[Any]:
        """f's outputs as NumPy arrays."""
        return self.half.numbers(self.held(*self.arrays(points)))

    def held(self, *xs: Any) -> list[Any]:
        """f's outputs at xs."""
        raise NotImplementedError

    def hold(self, x: Any) -> Any:
        """A value that f stops: x, or that of the first run."""
        raise NotImplementedError

    def numbers(self, xs: Sequence[Any]) -> list[Any]:
        """Arrays as NumPy arrays."""
        return self.half.numbers(xs)

    def arrays(self, points: Sequence[Any]) -> list[Any]:
        """NumPy arrays as f's arguments."""
        return self.half.like(points, self.leaves)

    def edit(self, name: str, xs: Sequence[Any], run: Callable[[], Any]) -> list[Any]:
        """The outputs of an edit, which may be left out."""
        self.edited = True
        if self.edits:
            return run()
        if name == "straight_through":
            return [xs[1] + self.hold(xs[0] - xs[1])]
        return list(xs if name == "clip_gradient" else xs[:1])

    def calls(self) -> list[Any]:
        """f's operations: name, line, function and arguments of each."""
        self.operations = []
        self.held(*self.leaves)
        found, self.operations = self.operations, None
        return found

    def called(self, name: str, fn: Callable[..., Any], leaves: Sequence[Any]) -> None:
        """A custom rule is called."""


# --- one comparison -----------------------------------------------------------------------------

_ORDERS = (
    ("", "vjp", ""),
    ("second ", "vjp", "vjp"),
    ("forward-mode ", "jvp", ""),
    ("reverse-over-forward ", "vjp", "jvp"),
)


def _wrong_operation(q: Question, members: Any) -> str:
    """The first operation of f whose own derivative is wrong, in words; else what may be."""
    calls, half, draw = q.program.calls(), members.half, lambda xs: [normal(q.rng, x) for x in xs]
    for word, outer, inner in _ORDERS:
        for name, line, fn, xs in calls:
            try:
                for member in filter(None, (inner, outer)):
                    program, at = half.plain(fn, xs), half.numbers(xs)
                    given = draw(at if member == "jvp" else program.base)
                    fn = members.derivative(program, given, member)
                derivative = partial(members.numbers_of, member)
                question = Question(program, at, derivative, given, q.rng, member == "jvp")
                if judge(question)[1].verdict == "differs":
                    return f"The {word}derivative of {name} is wrong by itself ({line})."
            except Exception:  # an operation that cannot be tried alone is not named
                continue
    return f"f holds {', '.join(q.program.suspects)}." if q.program.suspects else ""


def compare_derivative(caller: str, fun: Any, members: Any, q: Question) -> None:
    """Compares one derivative, and raises a `DerivativeError` if it differs."""
    report, half, state = here.report, members.half, members.half.state()
    assert report is not None
    with set_here(program=q.program, own=0):
        try:
            q, answer = judge(q)
            if answer.verdict == "differs" and not q.program.unseen:
                raise DerivativeError(_text(caller, fun, members, q, answer))
        finally:
            half.restore(state)
    if answer.verdict == "agrees":
        report.compared += 1
    else:
        report.skipped[UNSEEN if q.program.unseen else NOISY] += 1
    report.notes += [note for note in q.program.notes if note not in report.notes]


def _text(caller: str, fun: Any, members: Any, q: Question, answer: Answer) -> str:
    call, first = getattr(fun, "call", fun), getattr(fun, "first", 0)
    paths = getattr(call, "paths", [f"leaf {i}" for i in range(len(q.xs))])[first:]
    pairs = enumerate(paths[: len(q.xs)])
    wrong = [path for i, path in pairs if ask(q, i).verdict == "differs"]
    f = getattr(call, "f", None)
    while (inner := getattr(f, "f", None) or getattr(f, "fun", None)) is not None:
        f = inner
    name, place = getattr(f, "__qualname__", type(f).__name__), definition_of(f)
    return " ".join(
        [
            f"{caller}: the derivative with respect to {', '.join(wrong[:3]) or 'its arguments'}",
            f"is not that of f's values: along a random direction it is {answer.slope:.6g}, and",
            f"central differences (step {answer.step:.1g}) give {answer.difference:.6g}.",
            f"f is {name} ({place}), differentiated at {innermost(lines_above(1))}.",
            *q.program.left,
            _wrong_operation(q, members),
        ]
    ).rstrip()


# --- the members of a backend that are replaced --------------------------------------------------

_MEMBERS = (
    "vjp", "jvp", "jvps", "linearize", "map_batches", "apply_rule", "apply_rule_by_key", "scaled",
    "run_chunks", "sum_chunks", "run_frozen", "run_checkpointed",
)  # fmt: skip


class _CheckedMembers:
    """The replaced members of one backend, which consult this thread's state."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.before = {n: backend.__dict__[n] for n in _MEMBERS if n in backend.__dict__}
        self.original = {n: getattr(backend, n) for n in _MEMBERS if hasattr(backend, n)}
        pushing = {n: partial(self._pushing, n) for n in ("jvp", "jvps", "linearize")}
        others = {"run_frozen": self._run_chunks, **pushing}
        for name, member in self.original.items():
            replaced = others.get(name) or getattr(self, f"_{name}")
            setattr(backend, name, partial(self._called, replaced, member))

    def remove(self) -> None:
        for name in self.original:
            del self.backend.__dict__[name]
        self.backend.__dict__.update(self.before)

    @property
    def half(self) -> Any:
        return self.backend.submodule("checked_mode", "checked").half

    def _called(self, replaced: Any, member: Any, *args: Any, **kwargs: Any) -> Any:
        if here.report is None:
            return member(*args, **kwargs)
        return replaced(partial(self.own, member), *args, **kwargs)

    def own(self, member: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a member as code of gradtools, whose stops are not the user's."""
        with set_here(own=here.own + 1), self.half.scope(True):
            return member(*args, **kwargs)

    def program(self, fun: Any, leaves: Sequence[Any], **how: Any) -> Any:
        """f as a program that runs again, recorded at the leaves; None if it is not compared."""
        report = here.report
        if here.program is not None or report is None or (here.taking and self.half.rehearses):
            return None
        if (leaves or not how) and (not leaves or self.half.traced(leaves)):
            report.skipped[TRACED] += 1
            return None
        state = self.half.state()
        try:
            return self.half.program(fun, leaves, **how)
        except DerivativeError:
            raise
        except Exception as error:  # the operator's own run raises it, if it is not of a second run
            report.notes.append(f"f could not run again: {type(error).__name__}: {error}")
            return None
        finally:
            self.half.restore(state)

    def derivative(self, program: Any, given: Sequence[Any], member: str) -> Callable[..., Any]:
        """The pullback or pushforward of a program at fixed vectors, which is differentiable."""
        if member == "vjp":
            return program.pullback(given)
        run: Any = lambda *a: (program.held(*a), [])

        def pushed(*xs: Any) -> list[Any]:
            along = self.half.like(given, xs)
            with set_here(own=0):
                if member == "jvp":
                    return self.original["jvp"](run, list(xs), along)[2]
                return self.original["linearize"](run, list(xs))[2](along)

        return pushed

    def numbers_of(self, member: str, program: Any, xs: Any, given: Any) -> list[Any]:
        """A derivative of a program as NumPy arrays."""
        return self.half.numbers(self.derivative(program, given, member)(*program.arrays(xs)))

    def compare(
        self, program: Any, fun: Any, leaves: Any, given: Any, known: Any, member: str
    ) -> None:
        """Compares a derivative that an operator took; traced ones are counted."""
        if program is None or here.program is not None or here.report is None:
            return
        if self.half.traced([*given, *known]):
            here.report.skipped[TRACED] += 1
            return
        at, given, known = map(self.half.numbers, (leaves, given, known))
        derivative = partial(self.numbers_of, member)
        q = Question(program, at, derivative, given, here.rng, member != "vjp", known)
        compare_derivative(getattr(fun, "caller", member), fun, self, q)

    def _comparing(self, program: Any, fun: Any, leaves: Any, linear: Any, member: str) -> Any:
        """A linear map whose results are compared."""

        def run(native: Any, given: Any) -> Any:
            result = self.own(native, given)
            self.compare(program, fun, leaves, given, result, member)
            return result

        return self.backend.linear_map(run, linear)

    def _vjp(self, run: Any, fun: Any, leaves: list[Any], **how: Any) -> Any:
        program = self.program(fun, leaves)
        with set_here(taking=True):
            result = run(fun, leaves, **how)
        transposed, compared = result.transposed, partial(self._comparing, program, fun, leaves)
        result.pullback = compared(result.pullback, "vjp")
        result.transposed = lambda: (push := transposed()) and compared(push, "linearize")
        return result

    def _pushing(self, member: str, run: Any, fun: Any, leaves: list[Any], *given: Any) -> Any:
        program = self.program(fun, leaves)
        with set_here(taking=True):
            outs, extras, result = run(fun, leaves, *given)
        if member == "linearize":
            return outs, extras, self._comparing(program, fun, leaves, result, member)
        pairs = zip(*given, result, strict=True) if member == "jvps" else [(*given, result)]
        for tangents, pushed in pairs:
            self.compare(program, fun, leaves, tangents, pushed, "jvp")
        return outs, extras, result

    def _map_batches(self, run: Any, f: Any, batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Compares the rows one by one, and the first with that of the batch."""
        report = here.report
        if report is None or here.program is not None or self.half.traced(batch):
            return run(f, batch, *args, **kwargs)
        before, skipped = report.compared, report.skipped.copy()
        result = run(f, batch, *args, **kwargs)
        if report.compared == before and batch and len(batch[0]):
            report.skipped, state, count = skipped, self.half.state(), len(batch[0])
            for i in range(0, count, -(-count // _MOST_ROWS)):
                f(*[x[i] for x in batch])
            with set_here(report=None):
                alone, twice = (self.half.numbers(f(*[x[0] for x in batch])) for _ in range(2))
            drawn = any((x != y).any() for x, y in zip(alone, twice, strict=True))
            for x, rows in zip(alone, self.half.numbers(result), strict=True):
                if not drawn and not np.allclose(x, rows[0], 0.01, 0.01 * np.abs(x).max(initial=0)):
                    raise DerivativeError("vmap: a row of a batch differs from the row alone.")
            self.half.restore(state)
        return result

    def _apply_rule(self, run: Any, rule: Any, *xs: Any) -> Any:
        if here.program is None or rule.reaches != "identity":
            return run(rule, *xs)
        return here.program.edit(rule.name, xs, partial(run, rule, *xs))

    def _apply_rule_by_key(self, run: Any, key: str, *xs: Any) -> Any:
        return self._apply_rule(lambda rule, *xs: run(key, *xs), by_key(key), *xs)

    def _scaled(self, run: Any, x: Any, factor: float) -> Any:
        if here.program is None:
            return run(x, factor)
        return here.program.edit("scale_gradient", [x], lambda: [run(x, factor)])[0]

    # --- parts through which a backward pass of the framework's own goes

    def native(self, caller: str, f: Any, run: Any, args: Any, kwargs: Any) -> None:
        """Compares `run(*args, **kwargs)`, which the framework itself may differentiate."""
        if here.program is not None or here.report is None or here.taking or here.own:
            return
        at, xs = self.flat(run, args, kwargs)

        def fun(*leaves: Any) -> tuple[list[Any], list[Any]]:
            left = iter(leaves)
            outs = at(*[next(left) if m else x for x, m in zip(values, moving, strict=True)])
            return [y for y in outs if self.backend.is_array(y) and self.backend.is_inexact(y)], []

        fun.caller, fun.f = caller, getattr(f, "f", f)  # type: ignore[attr-defined]
        state = self.half.state()
        with self.half.native(xs) as (values, moving), set_here(taking=False):
            leaves = [x for x, m in zip(values, moving, strict=True) if m]
            if program := values and self.program(fun, leaves, captures=True):
                vs = [normal(here.rng, y) for y in program.base]
                at_leaves, derivative = (
                    self.half.numbers(program.leaves),
                    partial(self.numbers_of, "vjp"),
                )
                q = Question(program, at_leaves, derivative, vs, here.rng)
                compare_derivative(caller, fun, self, q)
        self.half.restore(state)

    def _run_chunks(self, run: Any, chunks: Any, *rest: Any) -> Any:
        def part(splits: Any, lists: Any, shared: Any) -> Any:
            axes = [axis for _, axis in chunks.splits]
            splits = list(zip(splits, axes, strict=True))
            outs = run(replace(chunks, splits=splits, lists=lists, shared=shared), *rest)
            return outs[0] if isinstance(outs, tuple) else outs  # without carries

        arrays = [x for x, _ in chunks.splits], chunks.lists, chunks.shared
        self.native(chunks.caller, chunks.call, part, arrays, {})
        return run(chunks, *rest)

    def _sum_chunks(self, run: Any, chunks: Any, *args: Any) -> Any:
        arrays = [*(x for x, _ in chunks.splits), *filter(self.backend.is_array, chunks.shared)]
        if self.half.rehearses and here.program is None and not self.half.traced(arrays):
            Recomputation.sum_chunks(self.backend, chunks)  # derivatives inside of it, at values
            with set_here(taking=True):
                return run(chunks, *args)
        return run(chunks, *args)

    def _run_checkpointed(self, run: Any, f: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.native("checkpoint", f, partial(run, f), args, kwargs)
        return run(f, *args, **kwargs)

    def flat(self, run: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """`run(*args, **kwargs)` as a function of leaves that returns leaves, and its leaves."""
        leaves, treedef = self.backend.flatten((args, kwargs))

        def at(*xs: Any) -> list[Any]:
            args, kwargs = self.backend.unflatten(treedef, list(xs))
            return list(self.backend.flatten(run(*args, **kwargs))[0])

        return at, leaves


# --- the context ---------------------------------------------------------------------------------

_lock, _hooks, _classes = threading.Lock(), list[_CheckedMembers](), list[tuple[type, Any]]()
_open = [0]


def _hooks_of(backend: Any) -> _CheckedMembers:
    return next(h for h in _hooks if h.backend is backend)


def _as_users(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that runs the user's function."""
    if here.report is None:
        return run(self, *args, **kwargs)
    with set_here(own=0), _hooks_of(self.backend).half.scope(False):
        return run(self, *args, **kwargs)


def _as_rule(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a custom rule."""
    if here.report is None or here.own:
        return run(self, *args, **kwargs)
    hooks = _hooks_of(self._backend)
    called = partial(hooks.own, run, self)
    if here.program is not None:
        here.program.called(f"the rule {self.__name__}", *hooks.flat(called, args, kwargs))
    hooks.native(self.__name__, self.fun, called, args, kwargs)
    return called(*args, **kwargs)


def _replace_members() -> None:
    for cls, call in ((Call, _as_users), (ChunkFunction, _as_users), (CustomRule, _as_rule)):
        run = cls.__call__
        _classes.append((cls, run))
        put: Any = lambda self, *a, call=call, run=run, **kw: call(run, self, *a, **kw)
        cls.__call__ = put  # type: ignore[method-assign]
    _hooks.extend(map(_CheckedMembers, FrameworkBackend.instances))
    FrameworkBackend.on_creation.append(lambda backend: _hooks.append(_CheckedMembers(backend)))


def _put_back_members() -> None:
    FrameworkBackend.on_creation.clear()
    while _hooks:
        _hooks.pop().remove()
    while _classes:
        cls, run = _classes.pop()
        cls.__call__ = run  # type: ignore[assignment]


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
                _put_back_members()
