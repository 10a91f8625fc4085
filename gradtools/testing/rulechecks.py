"""A custom rule taken apart: each part is checked as the plain function that it is.

With fun = f, fwd(x) = (f(x), r(x)), bwd(r, v) = J^H v and jvp(x, u) = (f(x), J u), the function
x -> bwd(r(x), v) is the gradient of Re<v, f>. Its own derivative, which is what second order uses,
goes through the residuals:

    d bwd(r(x), v) = sum over k of (d bwd / d r_k) (d r_k / d x)

so a residual that lost its derivative on the way (r_k detached, or computed where the framework
cannot see) makes second order wrong, and is found by differencing r_k itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing import numeric
from gradtools.testing.checks import NAMES, Check, _flat, check_settings, is_jax, pattern
from gradtools.testing.probe import (
    FIRST,
    Probe,
    backend_name,
    inner,
    no_such_mode,
    size,
    wants_64_bits,
)
from gradtools.testing.report import DIFFERS, Report, compare_arrays, mismatch
from gradtools.testing.sides import double_precision

ASKED = "check_rule"


@dataclass(frozen=True)
class Parts:
    """What a rule is made of; `call` is the whole, as users call it."""

    call: Callable[..., Any]
    fun: Callable[..., Any]
    fwd: Callable[..., Any] | None
    bwd: Callable[..., Any] | None
    jvp: Callable[..., Any] | None
    static: tuple[int, ...]


def check_rule(
    rule: Any, args: Sequence[Any], backend: Any, order: int = 2, *, seed: int = 0
) -> Report:
    """Checks a custom rule: its parts one by one, then the function that it makes.

    The parts are checked as plain functions: fwd's and jvp's value against fun's; that bwd
    returns one entry for each argument, each like its argument; bwd and jvp against slopes of
    fun, and against each other; bwd's linearity in the cotangent and jvp's in the tangent. At
    second order bwd(residuals, v) is differentiated through fwd: a residual whose derivative is
    lost on the way (detached, or computed outside the framework) is named, and so is a bwd or jvp
    that treats a residual or primal as a constant. Then `check_derivatives` checks the rule in
    all modes.

    Args:
        rule: What `gt.custom_rule` made: callable, with the attributes `fun`, `fwd`, `bwd` and
            `jvp` (None where not given), and `static_argnames`. A `jax.custom_vjp`
            or `jax.custom_jvp` of real arrays will do, and so will a `gradtools.rules.Rule`.
        args: As in `check_derivatives`.
        backend: As in `check_derivatives`.
        order: 1 or 2.
        seed: Chooses the random directions.

    Returns:
        A `Report`, as `check_derivatives` does.

    Raises:
        AgreementError: The rule is wrong. It names the part, the argument or the residual.
        GradtoolsError: `rule` is no rule, or as `check_derivatives` does.

    Example:
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> from gradtools.testing import check_rule
        >>> class Square:
        ...     fun = staticmethod(lambda x: x * x)
        ...     fwd = staticmethod(lambda x: (x * x, x))
        ...     bwd = staticmethod(lambda x, ct: (3 * x * ct,))  # wrong: should be 2
        ...     __call__ = fun
        >>> check_rule(Square(), (np.array([1.0, 2.0]),), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...bwd | finite differences of argument 0...
    """
    check_settings(order, None)
    with double_precision(is_jax(backend) and wants_64_bits(args)):
        check = RuleCheck(rule, args, backend, seed)
        check.parts(order)
        check.report.require()
        check.whole(order)
    return check.report.require()


class RuleCheck:
    """The comparisons for one rule at one point; they are collected in `report`."""

    def __init__(self, rule: Any, args: Sequence[Any], backend: Any, seed: int) -> None:
        self.backend, self.seed = backend_name(ASKED, backend), seed
        self.rule = taken_apart(rule, self.backend)
        if not isinstance(args, tuple | list):
            raise GradtoolsError(f"{ASKED}: args must be a tuple, got a {type(args).__name__}.")
        self.args = tuple(args)
        self.values = Probe(ASKED, self.rule.fun, self.args, self.backend)
        self.check = Check(self.values, None, seed=seed)
        name = getattr(rule, "__name__", None) or getattr(rule, "name", None) or "a rule"
        self.report = Report(f"check_rule of {name} in {self.backend}", NAMES)
        self.check.report = self.report
        self.gt, self.waist = self.values.gt, self.values.waist

    # --- first order: each part against fun's values

    def parts(self, order: int) -> None:
        """fwd, bwd and jvp one by one."""
        pulled = pushed = None
        if self.rule.bwd is not None:
            self._same_value("fwd", lambda *a: self._fwd(*a)[0])
            pulled = self._pull(self.check.vs)
            self._check_bwd(pulled)
        if self.rule.jvp is not None:
            self._same_value("jvp", lambda *a: self._jvp(a, self._zeros())[0])
            pushed = self._check_jvp()
        if pulled is not None and pushed is not None:
            self._check_adjoint(pulled)
        if order == 2 and self.report and self.rule.bwd is not None:
            self._residuals()
            names = [f"bwd's cotangent of {path}" for path in self.values.paths]
            self._second("bwd", names, lambda *xs: self._cotangents(xs, self._vs_arrays()))
        if order == 2 and self.report and self.rule.jvp is not None:
            us = self.check._everywhere().us
            names = [f"jvp's tangent of {path}" for path in self.values.out_paths]
            self._second("jvp", names, lambda *xs: self._tangents(xs, us))
        self.check.say_undecided()

    def _same_value(self, part: str, run: Callable[..., Any]) -> None:
        other = Probe(ASKED, run, self.args, self.backend)
        if len(other.out) != len(self.values.out):
            raise GradtoolsError(
                f"{ASKED}: {part} returned {len(other.out)} floating outputs, fun returns "
                f"{len(self.values.out)}. {part} must return fun's output first."
            )
        for path, a, b in zip(self.values.out_paths, other.out, self.values.out, strict=True):
            record = compare_arrays(f"{part}'s value | fun's value", path, a, b, 0)
            if not record.agrees:
                record = record.because(pattern(a, b) or f"{part} computes another function")
            elif a.dtype != b.dtype:
                words = (str(a.dtype), str(b.dtype))
                record = mismatch(record.quantity, path, 0, words, a.shape)
                record = record.because(f"{part}'s output has another dtype")
            self.report.comparisons.append(record)

    def _check_bwd(self, pulled: list[np.ndarray]) -> None:
        for i, mine in enumerate(pulled):
            for direction in self.check._directions(i):
                us = direction.us
                line = lambda t, us=us: _flat(self.values.value(self.check._moved(us, t)))
                found = numeric.slope(line, self.values.eps)
                record = self.check._reverse_against_slope("bwd", direction, mine, line, found)
                self.report.comparisons.append(record)
        draw = lambda: [self.check._draw(y.shape, y.dtype) for y in self.values.out]
        self.check._linear("bwd", "cotangent", self._pull, draw, self.values.paths)

    def _check_jvp(self) -> list[np.ndarray]:
        pushed: list[np.ndarray] = []
        for i, path in enumerate(self.values.paths):
            for direction in self.check._directions(i):
                us = direction.us
                pushed = self._push(us)
                line = lambda t, us=us: _flat(self.values.value(self.check._moved(us, t)))
                found = numeric.slope(line, self.values.eps)
                self.check._against_slope("jvp", path, _flat(pushed), found, 1)
        draw = lambda: self.check._everywhere().us
        self.check._linear("jvp", "tangent", self._push, draw, self.values.out_paths)
        return pushed

    def _check_adjoint(self, pulled: list[np.ndarray]) -> None:
        for i, path in enumerate(self.values.paths):
            us = next(iter(self.check._directions(i))).us
            pushed = self._push(us)
            noise = self.check._exact(1) * max(size(self.check.vs, pushed), size(us, pulled))
            self.check._compare(
                "bwd | jvp", path, inner(us, pulled), inner(self.check.vs, pushed), 1, noise,
                "the two rules disagree", "Left Re<bwd(v), u>, right Re<v, jvp(u)>.",
            )  # fmt: skip

    # --- second order: the parts differentiated

    def _residuals(self) -> None:
        """Each residual's derivative against its own values."""
        residuals = lambda *args: self._fwd(*args)[1]
        found = residuals(
            *self._rebuilt(self.values._arrays(self.values.leaves, self.values.leaves))
        )
        if not any(map(self.values._differentiable, self.waist.flatten(found)[0])):
            return  # nothing that has a derivative
        probe = Probe(ASKED, residuals, self.args, self.backend)
        check = Check(probe, None, seed=self.seed)
        for i, argument in enumerate(probe.paths):
            us = next(iter(check._directions(i))).us
            moved = self._derivative(probe, us)
            if moved is None:
                return
            line = lambda t, us=us: _flat(probe.value(check._moved(us, t)))
            parts = numeric.slope(line, probe.eps).parts(probe.out)
            for out_path, mine, part in zip(probe.out_paths, moved, parts, strict=True):
                name = f"residual {out_path.removeprefix('output') or '[0]'} by {argument}"
                record = check._against_slope("residual", name, mine, part, 2, add=False)
                if record.status == DIFFERS:
                    why = "a residual's derivative is lost between the arguments and fwd's return"
                    record = record.because(f"{why}: right at first order, wrong at second")
                self.report.comparisons.append(record)
        check.say_undecided()
        self.report.left_out += check.report.left_out

    def _derivative(self, probe: Probe, us: list[np.ndarray]) -> list[np.ndarray] | None:
        """Residuals' tangents, in forward mode or by transposing twice over."""
        try:
            return probe.forward(probe.leaves, us)
        except Exception as error:
            if not no_such_mode(error):
                raise
        self.report.left_out.append("the residuals' derivatives: fwd has no forward mode")
        return None

    def _second(self, part: str, names: list[str], run: Callable[..., Any]) -> None:
        """The part's own derivative, taken as the framework takes it, against its values."""
        probe = Probe(ASKED, run, tuple(self.values.leaves), self.backend)
        probe.paths, probe.out_paths = self.values.paths, names
        check = Check(
            probe, None, seed=self.seed, labels={m: f"{m} mode over {part}" for m in FIRST}
        )
        check.allow_jumps = True
        check.first_order()
        for record in check.report.comparisons:
            if not record.agrees:
                cause = "right at first order, wrong at second: something is taken as constant"
                record = record.because(
                    cause, f"The derivative of {part} itself, as double backward takes it. "
                    + record.detail,
                )  # fmt: skip
            self.report.comparisons.append(record)
        self.report.left_out += [f"over {part}: {reason}" for reason in check.report.left_out]

    def whole(self, order: int) -> None:
        """`check_derivatives` of the rule as users call it."""
        probe = Probe(ASKED, self.rule.call, self.args, self.backend)
        check = Check(probe, None, seed=self.seed)
        check.report = self.report
        check.first_order()
        if order == 2:
            check.second_order()

    # --- the parts as functions of all arguments, in the backend's arrays

    def _fwd(self, *args: Any) -> tuple[Any, Any]:
        assert self.rule.fwd is not None
        out = self.rule.fwd(*args)
        if not isinstance(out, tuple) or len(out) != 2:
            raise GradtoolsError(
                f"{ASKED}: fwd must return a pair (output, residuals), got a {type(out).__name__}."
            )
        return out

    def _cotangents(self, moving: Sequence[Any], vs: list[Any]) -> list[Any]:
        """bwd's entries for the differentiable leaves, checked; zeros for None."""
        args = self._rebuilt(moving)
        out, residuals = self._fwd(*args)
        leaves, tree = self.waist.flatten(out)
        left = iter(vs)
        full = [next(left) if self.values._differentiable(y) else None for y in leaves]
        assert self.rule.bwd is not None
        static = [args[i] for i in self.rule.static]
        found = self.rule.bwd(*static, residuals, self.waist.unflatten(tree, full))
        return self._entries(found, args)

    def _entries(self, found: Any, args: tuple[Any, ...]) -> list[Any]:
        wanted = [i for i in range(len(args)) if i not in self.rule.static]
        if not isinstance(found, tuple | list) or len(found) != len(wanted):
            count = f"{len(found)}" if isinstance(found, tuple | list) else "no tuple"
            raise GradtoolsError(
                f"{ASKED}: bwd returned {count} entries, expected a tuple of {len(wanted)}, one "
                "for each argument (None for a zero)."
            )
        entries: list[Any] = []
        for i, entry in zip(wanted, found, strict=True):
            entries += self._entry(i, entry, args[i])
        return entries

    def _entry(self, i: int, entry: Any, arg: Any) -> list[Any]:
        """The cotangents of the differentiable leaves of argument i."""
        leaves = self.waist.flatten(arg)[0]
        given = [None] * len(leaves) if entry is None else self.waist.flatten(entry)[0]
        moving = [k for k, x in enumerate(leaves) if self.values._differentiable(x)]
        if len(given) != len(leaves):
            given = self._without_integers(i, given, leaves, moving)
        found = []
        for k in moving:
            x, g = leaves[k], given[k]
            if g is not None and tuple(g.shape) != tuple(x.shape):
                raise GradtoolsError(
                    f"{ASKED}: bwd's entry for argument {i} has shape {tuple(g.shape)}, the "
                    f"argument has {tuple(x.shape)}. Sum it over what was broadcast."
                )
            found.append(self.waist.zeros_like(x) if g is None else g)
        return found

    def _without_integers(self, i: int, given: Any, leaves: Any, moving: list[int]) -> list[Any]:
        if len(given) != len(moving):
            raise GradtoolsError(
                f"{ASKED}: bwd's entry for argument {i} has {len(given)} leaves, the argument has "
                f"{len(leaves)}. Return a tree like the argument, or None for a zero."
            )
        full: list[Any] = [None] * len(leaves)
        for k, g in zip(moving, given, strict=True):
            full[k] = g
        return full

    def _tangents(self, moving: Sequence[Any], us: list[np.ndarray]) -> list[Any]:
        args = self._rebuilt(moving)
        out, pushed = self._jvp(args, us)
        likes = self.waist.flatten(out)[0]
        given = self.waist.flatten(pushed)[0]
        kept = [y for y in likes if self.values._differentiable(y)]
        if len(given) not in (len(kept), len(likes)):
            raise GradtoolsError(
                f"{ASKED}: jvp returned {len(given)} tangents for {len(likes)} outputs."
            )
        pairs = zip(likes, given, strict=True) if len(given) == len(likes) else None
        return [t for y, t in pairs if self.values._differentiable(y)] if pairs else list(given)

    def _jvp(self, args: tuple[Any, ...], us: list[np.ndarray]) -> tuple[Any, Any]:
        assert self.rule.jvp is not None
        free = [a for i, a in enumerate(args) if i not in self.rule.static]
        left = iter(self.values._arrays(us, self.values.leaves))
        tangents = []
        for a in free:
            leaves, tree = self.waist.flatten(a)
            moved = [next(left) if self.values._differentiable(x) else None for x in leaves]
            none = not any(m is not None for m in moved)
            tangents.append(None if none else self.waist.unflatten(tree, moved))
        static = [args[i] for i in self.rule.static]
        found = self.rule.jvp(*static, tuple(free), tuple(tangents))
        if not isinstance(found, tuple) or len(found) != 2:
            raise GradtoolsError(
                f"{ASKED}: jvp must return a pair (output, tangent), got a {type(found).__name__}."
            )
        return found

    def _pull(self, vs: list[np.ndarray]) -> list[np.ndarray]:
        cts = list(self.values._arrays(vs, self.values.out))
        return self.values._numpy(self._cotangents(self._moving(), cts))

    def _push(self, us: list[np.ndarray]) -> list[np.ndarray]:
        return self.values._numpy(self._tangents(self._moving(), us))

    def _moving(self) -> Sequence[Any]:
        return self.values._arrays(self.values.leaves, self.values.leaves)

    def _vs_arrays(self) -> list[Any]:
        return list(self.values._arrays(self.check.vs, self.values.out))

    def _zeros(self) -> list[np.ndarray]:
        return [np.zeros_like(x) for x in self.values.leaves]

    def _rebuilt(self, moving: Sequence[Any]) -> tuple[Any, ...]:
        full = list(self.values._all)
        for i, x in zip(self.values._moving, moving, strict=True):
            full[i] = x
        return self.waist.unflatten(self.values._tree, full)


def taken_apart(rule: Any, backend: str) -> Parts:
    """The parts of what `gt.custom_rule` made, of JAX's own custom rules, or of a `Rule`."""
    if hasattr(rule, "primal") and hasattr(rule, "cotangent"):
        return _of_record(rule, backend)
    fun = getattr(rule, "fun", None)
    fwd, bwd, jvp = (getattr(rule, name, None) for name in ("fwd", "bwd", "jvp"))
    if not callable(fun) or not callable(rule) or (jvp is None and (fwd is None or bwd is None)):
        raise GradtoolsError(
            f"{ASKED}: got a {type(rule).__name__}, which is no rule with derivatives; expected "
            "what gt.custom_rule made, after .defvjp(fwd, bwd) or .defjvp(rule). For a plain "
            "function use check_derivatives."
        )
    static = _static(rule, fun)
    if static and fwd is not None and getattr(rule, "static_argnames", ()):
        fwd = _in_the_functions_order(fwd, static)
    return Parts(rule, fun, fwd, bwd, jvp, static)


def _in_the_functions_order(fwd: Callable[..., Any], static: tuple[int, ...]) -> Any:
    """fwd of `gt.custom_rule`, whose static arguments lead, as a function of fun's arguments."""

    def ordered(*args: Any) -> Any:
        rest = [a for i, a in enumerate(args) if i not in static]
        return fwd(*[args[i] for i in static], *rest)

    return ordered


def _static(rule: Any, fun: Callable[..., Any]) -> tuple[int, ...]:
    import inspect

    given = getattr(rule, "nondiff_argnums", ())
    names = tuple(getattr(rule, "static_argnames", ()) or ())
    if not names:
        return tuple(given or ())
    parameters = list(inspect.signature(fun).parameters)
    return tuple(sorted(parameters.index(name) for name in names))


def _of_record(rule: Any, backend: str) -> Parts:
    from importlib import import_module

    waist = import_module(f"gradtools.{backend}")._api._backend
    fun = lambda *xs: list(rule.primal(*xs))
    fwd = lambda *xs: (fun(*xs), list(xs))
    read = lambda xs: rule.saved(xs, fun(*xs))
    bwd = lambda xs, cts: tuple(rule.cotangent(read(xs), cts))
    jvp = lambda xs, dxs: (fun(*xs), list(rule.tangent(read(xs), dxs)))
    return Parts(
        lambda *xs: list(waist.apply_rule(rule, *xs)),
        fun,
        fwd if rule.cotangent else None,
        bwd if rule.cotangent else None,
        jvp if rule.tangent else None,
        (),
    )
