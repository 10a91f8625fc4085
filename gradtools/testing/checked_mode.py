"""`checked`: compares every derivative that gradtools takes in a block with differences of values.

For a pullback at cotangents v, and a pushforward along a tangent u, along one random direction

    Re<J^H v, u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>  =  Re<v, J u>

at two step sizes h, and at three more where these disagree. What is meant to differ is left out:
edits are identities on both sides, and a stop that f itself executes (`stop_gradient`, `detach`, a
`no_grad` block) keeps the value of the first run in all others. Stops of gradtools' own, and those
inside of custom functions and rules, do not. `gradtools.torch.checked_mode` and
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
from gradtools.testing.central_differences import Answer, Question, ask, ask_again, moves, normal

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
    rows: list[bool] | None = None  # in `map_batches`: filled by linear maps of its rows


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


# --- one comparison -----------------------------------------------------------------------------


def _answer(q: Question) -> Answer:
    """As `ask`, without edits; what differs does so in two directions, and at two points."""
    if q.program.edited and q.again is not None:
        q.program = q.program.without_edits()
        q.known = q.again(q.program, q.xs, q.us)
    answer = ask(q)
    if answer.verdict == "differs":
        answer = ask_again(q)
    if q.again is None or answer.verdict not in ("differs", "kink"):
        return answer
    if not np.isfinite(answer.slope) or not _same(q.known, q.again(q.program, q.xs, q.us)):
        return answer
    away = 30 * q.program.eps ** (1 / 3)  # a kink or a tie is at this point alone
    xs = [x + away * u for x, u in zip(q.xs, moves(q), strict=True)]
    near = replace(q, xs=q.program.numbers(q.program.arrays(xs)))
    kept, q.program.base = q.program.base, q.program(near.xs)
    near.known = q.again(q.program, near.xs, q.us)
    found = ask_again(near)
    if found.verdict == "differs" and answer.verdict == "kink":  # the error is about this point
        q.xs, q.known = near.xs, near.known
        return found
    q.program.base = kept
    return answer if found.verdict == "differs" else found


def _same(xs: list[Any], ys: list[Any]) -> bool:
    filled = lambda x, y: np.zeros_like(y) if x is None else x
    pairs = [(filled(x, y), filled(y, x)) for x, y in zip(xs, ys, strict=True) if x is not y]
    return all(np.allclose(x, y, 0.01, 0.01 * np.abs(y).max(initial=0)) for x, y in pairs)


def _wrong_operation(q: Question, half: Any) -> str:
    """The first operation of f whose own derivative is wrong, in words; else what may be."""
    calls = q.program.calls()
    words = ("", "second ", "forward-mode ", "reverse-over-forward ")
    for order, word in enumerate(words):
        for name, line, fn, xs in calls:
            try:
                at, first = half.numbers(xs), half.plain(fn, xs)
                us = [normal(here.rng, x) for x in at] if order > 1 else None
                if order == 1:  # the derivative is the operation
                    first = half.plain(
                        first.pullback([normal(here.rng, y) for y in first.base]), xs
                    )
                elif order == 3:
                    first, us = half.plain(first.pushforward(us), xs), None
                vs = None if us else [normal(here.rng, y) for y in first.base]
                known = half.numbers((first.pushforward(us) if us else first.pullback(vs))(*xs))
                if ask(Question(first, at, known, vs, us, rng=here.rng)).verdict == "differs":
                    return f"The {word}derivative of {name} is wrong by itself ({line})."
            except Exception:  # an operation that cannot be tried alone is not named
                continue
    return f"f holds {', '.join(q.program.suspects)}." if q.program.suspects else ""


def compare_derivative(caller: str, fun: Any, half: Any, q: Question) -> None:
    """Compares one derivative, and raises a `DerivativeError` if it differs."""
    report, state = here.report, half.state()
    assert report is not None
    with set_here(program=q.program, own=0):
        try:
            answer = _answer(q)
            if answer.verdict == "differs" and not q.program.unseen:
                raise DerivativeError(_text(caller, fun, half, q, answer))
        finally:
            half.restore(state)
    if answer.verdict == "agrees":
        report.compared += 1
    else:
        report.skipped[UNSEEN if q.program.unseen else NOISY] += 1
    report.notes += [note for note in q.program.notes if note not in report.notes]


def _text(caller: str, fun: Any, half: Any, q: Question, answer: Answer) -> str:
    call, first = getattr(fun, "call", fun), getattr(fun, "first", 0)
    paths = getattr(call, "paths", [f"leaf {i}" for i in range(len(q.xs))])
    wrong = []
    for i, path in enumerate(paths[first : first + len(q.xs)]):
        one = q
        if q.us is not None and q.again is not None:
            us = [u if i == k else 0 * u for k, u in enumerate(q.us)]
            one = replace(q, us=us, known=q.again(q.program, q.xs, us))
        if ask(one, i).verdict == "differs":
            wrong.append(path)
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
            _wrong_operation(q, half),
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
        for name, member in self.original.items():
            setattr(backend, name, partial(self._called, getattr(self, f"_{name}"), member))

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
            if here.rows is None:
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

    def _is_compared(self, program: Any, arrays: Sequence[Any]) -> bool:
        """Whether a linear map at these arrays is compared; if they are a batch, its rows are."""
        if program is None or here.program is not None or here.report is None:
            return False
        if not self.half.traced(arrays):
            return True
        if here.rows is None:
            here.report.skipped[TRACED] += 1
        else:
            here.rows.append(True)
        return False

    def _vjp(self, run: Any, fun: Any, leaves: list[Any], **how: Any) -> Any:
        program, numbers = self.program(fun, leaves), self.half.numbers
        with set_here(taking=True):
            result = run(fun, leaves, **how)
        transposed = result.transposed

        def pullback(native: Any, cts: Any) -> Any:
            grads = self.own(native, cts)
            if self._is_compared(program, [*cts, *grads]):
                again = lambda program, xs, us: program.pulled(xs, numbers(cts))
                q = Question(
                    program, numbers(leaves), numbers(grads), numbers(cts), None, again, here.rng
                )
                compare_derivative(getattr(fun, "caller", "vjp"), fun, self.half, q)
            return grads

        def wide() -> Any:
            push = transposed()
            return push and self._pushing(program, fun, leaves, push, "linearize")

        result.pullback = self.backend.linear_map(pullback, result.pullback)
        result.transposed = wide
        return result

    def _pushed(
        self, program: Any, fun: Any, leaves: Any, tangents: Any, pushed: Any, caller: str
    ) -> None:
        def again(program: Any, xs: list[Any], us: list[Any]) -> list[Any]:
            run: Any = lambda *a: (program.held(*a), [])
            along = self.half.like(us, tangents)
            with set_here(own=0):
                if caller == "jvp":
                    return numbers(self.original["jvp"](run, program.arrays(xs), along)[2])
                return numbers(self.original["linearize"](run, program.arrays(xs))[2](along))

        numbers = self.half.numbers
        if self._is_compared(program, [*tangents, *pushed]):
            q = Question(
                program, numbers(leaves), numbers(pushed), None, numbers(tangents), again, here.rng
            )
            compare_derivative(getattr(fun, "caller", caller), fun, self.half, q)

    def _pushing(self, program: Any, fun: Any, leaves: Any, push: Any, caller: str) -> Any:
        def pushforward(push: Any, tangents: Any) -> Any:
            pushed = self.own(push, tangents)
            self._pushed(program, fun, leaves, tangents, pushed, caller)
            return pushed

        return self.backend.linear_map(pushforward, push)

    def _jvp(self, run: Any, fun: Any, leaves: list[Any], tangents: list[Any]) -> Any:
        program = self.program(fun, leaves)
        with set_here(taking=True):
            result = run(fun, leaves, tangents)
        self._pushed(program, fun, leaves, tangents, result[2], "jvp")
        return result

    def _jvps(self, run: Any, fun: Any, leaves: list[Any], many: Sequence[list[Any]]) -> Any:
        program = self.program(fun, leaves)
        with set_here(taking=True):
            result = run(fun, leaves, many)
        for tangents, pushed in zip(many, result[2], strict=True):
            self._pushed(program, fun, leaves, tangents, pushed, "jvp")
        return result

    def _linearize(self, run: Any, fun: Any, leaves: list[Any]) -> Any:
        program = self.program(fun, leaves)
        with set_here(taking=True):
            outs, extras, push = run(fun, leaves)
        return outs, extras, self._pushing(program, fun, leaves, push, "linearize")

    def _map_batches(self, run: Any, f: Any, batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Compares the rows one by one; those of a linear map as one random combination."""
        report = here.report
        if report is None or here.program is not None or self.half.traced(batch):
            return run(f, batch, *args, **kwargs)
        compared, rows = report.compared, list[bool]()
        with set_here(rows=rows):
            result = run(f, batch, *args, **kwargs)
        if report.compared == compared and batch and len(batch[0]):
            state, numbers = self.half.state(), self.half.numbers
            if rows:
                weights = here.rng.standard_normal(len(batch[0]))
                sums = lambda xs: [np.tensordot(weights, x, 1) for x in numbers(xs)]
                alone = f(*self.half.like(sums(batch), [x[0] for x in batch]))
                for x, y in zip(sums(result), numbers(alone), strict=True):
                    if not np.allclose(x, y, rtol=0.01, atol=0.01 * np.abs(y).max(initial=0)):
                        raise DerivativeError("jacobian: rows in a batch differ from rows alone.")
            count = len(batch[0])  # f may be run again, and the rows must be the same
            for i in [] if rows else range(0, count, -(-count // _MOST_ROWS)):
                f(*[x[i] for x in batch])
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

    def native(self, caller: str, f: Any, at: Callable[..., Any], xs: Sequence[Any]) -> None:
        """Compares a part of a program, a function of xs, if the framework differentiates it."""
        if here.program is not None or here.report is None or here.taking or here.own:
            return
        state = self.half.state()
        with self.half.native(at, xs) as found, set_here(taking=False):
            program = found and self.program(*found, captures=True)
            if program:
                vs, again = (
                    [normal(here.rng, y) for y in program.base],
                    lambda p, xs, us: p.pulled(xs, vs),
                )
                at_xs = self.half.numbers(program.leaves)
                q = Question(program, at_xs, again(program, at_xs, None), vs, None, again, here.rng)
                fun = partial(at)
                fun.f = getattr(f, "f", f)  # type: ignore[attr-defined]
                compare_derivative(caller, fun, self.half, q)
        self.half.restore(state)

    def _run_chunks(self, run: Any, chunks: Any) -> Any:
        def at(*xs: Any) -> Any:
            left = iter(xs)
            splits = [(next(left), axis) for _, axis in chunks.splits]
            lists = [[next(left) for _ in row] for row in chunks.lists]
            return run(replace(chunks, splits=splits, lists=lists, shared=[*left]))[0]

        every = [[x for x, _ in chunks.splits], *chunks.lists, chunks.shared]
        self.native(chunks.caller, chunks.call, at, [x for xs in every for x in xs])
        return run(chunks)

    def _sum_chunks(self, run: Any, chunks: Any, *args: Any) -> Any:
        arrays = [*(x for x, _ in chunks.splits), *filter(self.backend.is_array, chunks.shared)]
        if self.half.rehearses and here.program is None and not self.half.traced(arrays):
            Recomputation.sum_chunks(self.backend, chunks)  # derivatives inside of it, at values
            with set_here(taking=True):
                return run(chunks, *args)
        return run(chunks, *args)

    def _run_frozen(self, run: Any, whole: Any, uses: Any) -> Any:
        at = lambda *xs: run(replace(whole, shared=list(xs)), uses)
        self.native(whole.caller, whole.call, at, whole.shared)
        return run(whole, uses)

    def _run_checkpointed(self, run: Any, f: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.native("checkpoint", f, *self.flat(partial(run, f), args, kwargs))
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
    at, leaves = hooks.flat(called, args, kwargs)
    if here.program is not None:
        here.program.called(f"the rule {self.__name__}", at, leaves)
    hooks.native(self.__name__, self.fun, at, leaves)
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
    start = {"own": 0, "taking": False, "rows": None, "program": None}
    try:
        with set_here(report=report, rng=np.random.default_rng(seed), **start):
            yield report
    finally:
        with _lock:
            _open[0] -= 1
            if not _open[0]:
                _put_back_members()
