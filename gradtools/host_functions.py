"""Implements `host_function`, which embeds a kernel on NumPy arrays in a framework's program.

A host function is a function with a custom rule; its value is computed by a kernel. Kernels cannot
be differentiated, so derivatives beyond the last user-written rule are derived from the symmetry of
the Hessian:

    bwd(x, c) = J(x)^H c is the gradient of Re<c, f(x)> with respect to x. The derivative of bwd
    along dx is the Hessian of Re<c, f(x)> times dx, which equals the pullback of dx through bwd,
    since a Hessian is symmetric.

A linear kernel A with an adjoint needs no rule: dy = A dx and x' = A^H y' are again linear kernels,
at every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np

from gradtools.arguments.checks import check_function
from gradtools.arguments.static_arguments import Parameters
from gradtools.arguments.wording import describe
from gradtools.backend import Array, Backend, Operators
from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError, MissingRuleError
from gradtools.host_kernels import ArraySpec, Kernel, carrier, read_only, remember
from gradtools.rules import ARRAY, Entries, Linearized, Rule, replaced_where, spread, total


class HostFunctions(Operators):
    """The operator that embeds a kernel in the framework's program."""

    ArraySpec = ArraySpec

    @overload
    def host_function(
        self,
        kernel: Callable[..., Any],
        out: Any = None,
        vectorized: bool = False,
        adjoint: Callable[..., Any] | None = None,
    ) -> HostFunction: ...
    @overload
    def host_function(
        self,
        kernel: None = None,
        out: Any = None,
        vectorized: bool = False,
        adjoint: Callable[..., Any] | None = None,
    ) -> Callable[[Callable[..., Any]], HostFunction]: ...
    def host_function(
        self,
        kernel: Any = None,
        out: Any = None,
        vectorized: bool = False,
        adjoint: Callable[..., Any] | None = None,
    ) -> Any:
        """Embeds a kernel on NumPy arrays (NumPy, SciPy, ctypes, C++) in the framework's program.

        The kernel runs in eager and compiled code, under vmap and in loops. Rules are set as for a
        `custom_rule`; a rule may call the function itself and other host functions with rules. If
        bwd is a host function with a bwd of its own, double backward, forward mode and forward over
        reverse are supported, because a Hessian is symmetric.

        Args:
            kernel: A function that receives read-only NumPy arrays (bfloat16 as float32) and
                returns NumPy arrays. Non-array arguments are passed unchanged.
            out: The specs of the results: None (one array like the first array argument), a pytree
                of `ArraySpec`s, or a function that returns such a pytree for the arguments, with
                arrays replaced by their ArraySpecs. Under vmap, `out` describes one example.
            vectorized: If False, vmap calls the kernel once per example. If True, vmap calls the
                kernel once, with leading batch axes on each array argument, which elementwise
                kernels support.
            adjoint: The adjoint of a linear kernel A, a kernel with Re<y, A x> = Re<adjoint(y), x>
                for all x and y. A kernel with an adjoint needs no rule, in either mode and at any
                order. The adjoint takes a cotangent of A's result and returns a cotangent of A's
                argument (a tuple for several arguments), which is real if the argument is real. A
                kernel with an adjoint must take only floating and complex arrays.

        Returns:
            A function of arrays. Without a rule, differentiating the returned function raises an
            error.

        Raises:
            GradtoolsError: (When called) the kernel's results differ from `out` in number, shape
                or dtype, or are a framework's arrays; the kernel calls JAX in a JAX program, which
                would deadlock; an argument of a kernel with an adjoint is not a floating or complex
                array. (Once in forward mode or at second order) a kernel with an adjoint is not 0
                at 0. The kernel's own exceptions propagate with their message.

        Example:
            >>> cube = gt.host_function(lambda x: x ** 3)
            >>> back = gt.host_function(lambda x, c: 3 * x ** 2 * c)
            >>> twice = gt.host_function(
            ...     lambda x, c, v: (6 * x * c * v, 3 * x ** 2 * v), out=lambda x, c, v: (x, c))
            >>> cube.defvjp(lambda x: (cube(x), x), lambda x, c: (back(x, c),))
            >>> back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda res, v: twice(*res, v))
            >>> x = gt.asarray(np.float64(2.0) if gt.xp.asarray(2.0).itemsize == 8
            ...                else np.float32(2.0))
            >>> [float(g(x)) for g in (cube, gt.grad(cube), gt.grad(gt.grad(cube)))]
            [8.0, 12.0, 12.0]

            A linear kernel with its adjoint, such as the methods of a SciPy LinearOperator:

            >>> A = np.float32([[1, 2, 3], [4, 5, 6]])
            >>> op = gt.host_function(
            ...     lambda x: A @ x, out=gt.ArraySpec((2,), "float32"), adjoint=lambda y: A.T @ y)
            >>> x = gt.asarray(np.float32([1, 0, 2]))
            >>> gt.to_numpy(gt.grad(lambda x: (op(x) ** 2).sum())(x)).tolist()
            [142.0, 188.0, 234.0]
        """
        if kernel is None:
            return partial(self.host_function, out=out, vectorized=vectorized, adjoint=adjoint)
        return HostFunction(self._backend, kernel, out, vectorized, adjoint)


# --- the function ------------------------------------------------------------------------


class HostFunction(CustomRule):
    """A function that runs a kernel in the framework's program; see `host_function`.

    Attributes:
        kernel: The kernel, and the specs of its results.
        adjoint: The adjoint of a linear kernel; None if not given.
    """

    _kind = "host function"
    __gradtools_holds__ = ("kernel", "fwd", "bwd", "jvp")

    def __init__(
        self, backend: Backend, kernel: Any, out: Any, vectorized: bool, adjoint: Any = None
    ) -> None:
        self.kernel = Kernel(kernel, out, vectorized)
        if adjoint is not None:
            order = "Pass a function of the cotangent, such as lambda y: A.T @ y."
            check_function("host_function", adjoint, "adjoint", order=order)
        self.adjoint = adjoint
        super().__init__(backend, kernel, ())
        self.fun = self._value
        self.opaque = False  # whether bwd is known to have no forward mode
        self._linear = set[Any]()  # the argument specs for which the kernel maps zeros to zeros

    def _make_binding(self) -> Parameters:
        return Parameters.positional(self.kernel.fun)

    def _value(self, *args: Any) -> Any:
        backend = self._backend
        call, xs = self.kernel.bind(backend, args)
        ys = backend.call_kernel(call, xs)
        return backend.unflatten(call.results_of(xs).treedef, ys)

    def linear(self, specs: tuple[ArraySpec, ...]) -> Callable[..., Any]:
        """Returns the kernel as its own derivative; raises an error if the kernel is not 0 at 0."""
        if specs not in self._linear:
            zeros = [read_only(np.zeros(s.shape, carrier(s.dtype))) for s in specs]
            with np.errstate(all="ignore"):  # a solver may return NaN for zeros
                ys = self._backend.flatten(self.kernel.fun(*zeros))[0]
            if any(np.any(np.nan_to_num(y)) for y in ys):
                raise GradtoolsError(
                    f"host function {self.__name__!r} has an adjoint, so its kernel must be "
                    "linear, but is not 0 at 0. Add a constant outside of the host function."
                )
            self._linear.add(specs)
        return self.kernel.fun

    def _rule(self, specialized: Specialization) -> Rule:
        if self.adjoint is not None:
            return _linear_rule(self, specialized)
        if self.bwd is None and self.jvp is None:

            def missing(saved: Entries, moving: Entries) -> Any:
                raise MissingRuleError(
                    f"host function {self.__name__!r} has no rule, so its derivative is unknown. "
                    "Define a rule with defvjp(fwd, bwd) or defjvp(rule), or stop the gradient "
                    "of the arguments."
                )

            return Rule(self.__name__, specialized.primal, missing, missing)
        rule = super()._rule(specialized)
        if self.bwd is None:
            return rule
        specialized.refined = partial(_maps_as_rules, self, specialized, {})
        # The maps compute the cotangents of all inputs, so fwd must treat every input as perturbed.
        return replace(rule, symbolic_zeros=self.symbolic_zeros - {"cotangent"})


def _linear_rule(host: HostFunction, specialized: Specialization) -> Rule:
    """Returns the rule of a linear kernel A: dy = A dx, x' = A^H y'; the adjoint of A^H is A."""
    backend, adjoints = host._backend, dict[Any, HostFunction]()
    args = specialized.arguments([ARRAY] * specialized.others.count(ARRAY))
    signature = host._binding.signature
    defaults = [] if signature is None else [p.default for p in signature.parameters.values()]
    alone = all(
        a is ARRAY or a is d
        for a, d in zip(args, [*defaults, *([ARRAY] * len(args))], strict=False)
    )
    if not alone or host.bwd is not None or host.jvp is not None:
        given = "was called with other arguments. Bind these with functools.partial"
        given = "also has a rule. Leave out the rule or the adjoint" if alone else given
        raise GradtoolsError(
            f"host function {host.__name__!r} has an adjoint, so it is linear in its arguments, "
            f"which are floating or complex arrays, and needs no rule; but it {given}."
        )

    def linearize(*xs: Array) -> Linearized:
        ys = specialized.primal(*xs)
        for v in (*xs, *ys):
            if not backend.is_inexact(v):
                raise GradtoolsError(
                    f"host function {host.__name__!r} has an adjoint, so its arguments must "
                    f"be floating or complex arrays; an argument has dtype {backend.dtype_name(v)}."
                )
        # The adjoint's `out`: a symbolic length is specialized, because the cotangents do not
        # determine it.
        sizes = lambda x: tuple(map(int, x.shape))
        specs = tuple([ArraySpec(sizes(x), backend.dtype_name(x)) for x in xs])
        out_def = specialized.newest
        x_avals, y_avals = ([*map(backend.aval, vs)] for vs in (xs, ys))
        adjoint = adjoints.get(key := (specs, out_def))
        if adjoint is None:
            out = specs if len(specs) > 1 else specs[0]
            # `there` and `back` take flat arrays, and return one array or a tuple.
            there = lambda *cts: _adjoint_at(host, backend.unflatten(out_def, cts), out)
            there.__name__ = f"{host.__name__}.adjoint"
            back = lambda x: _alone(
                backend.flatten(host.linear(specs)(*(x if len(specs) > 1 else [x])))[0]
            )
            adjoint = HostFunction(backend, there, out, host.kernel.vectorized, back)
            adjoint.kernel = replace(adjoint.kernel, declared=False)
            adjoints[key] = adjoint

        def full(vs: Entries, avals: Sequence[Any]) -> list[Array]:
            device = next(v for v in vs if v is not None)
            pairs = zip(vs, avals, strict=True)
            return [backend.zeros(aval, device) if v is None else v for v, aval in pairs]

        def tangent(_: Entries, dxs: Entries) -> list[Array]:
            host.linear(specs)
            return backend.apply_rule(specialized.rule, *full(dxs, x_avals))

        def cotangent(_: Entries, cts: Entries) -> list[Array]:
            pulled = adjoint(*full(cts, y_avals))
            return [pulled] if len(specs) == 1 else list(pulled)

        return Linearized(list(ys), [], (), tangent, cotangent, key=key)

    return Rule(host.__name__, specialized.primal, linearize=linearize)


def _adjoint_at(host: HostFunction, ct: Any, out: Any) -> Any:
    """Calls a kernel's adjoint with the cotangent `ct`; adds a note to errors of the adjoint."""
    assert host.adjoint is not None
    try:
        return host.adjoint(ct)
    except Exception as error:
        error.add_note(
            f"host function {host.__name__!r}: adjoint was called with a cotangent of the kernel's "
            f"result, {describe(host._backend, ct)}. It must return a cotangent of the kernel's "
            f"argument, {out}."
        )
        raise


def _alone(values: Sequence[Any]) -> Any:
    """Returns the only value, or a tuple of several values."""
    return values[0] if len(values) == 1 else tuple(values)


def _maps_as_rules(
    host: HostFunction,
    specialized: Specialization,
    known: dict[Any, _KernelMaps],
    linearized: Linearized,
    moving: Sequence[bool],
    outs: Entries,
) -> Linearized:
    """Converts the maps of a host function with a reverse rule to differentiable rules.

    Args:
        host: The host function.
        specialized: The host function on flat arrays.
        known: A cache of the rules, by residual structure and output avals.
        linearized: The maps of one evaluation.
        moving: Whether each input is floating or complex.
        outs: The avals of the outputs; None for integers.
    """
    backend, n, k = host._backend, len(moving), len(linearized.saves)
    key = (linearized.key, tuple(outs))
    try:
        maps = known.get(key)
    except TypeError:  # a residual is not hashable
        key, maps = None, None
    if maps is None:
        bwd, saves = linearized.cotangent, linearized.saves
        maps = _KernelMaps(host, specialized, saves, bwd, tuple(moving), tuple(outs))
        if key is not None:
            remember(known, key, maps)
    given = linearized.tangent  # the closures must not reference `linearized`
    rules = maps.push, maps.pull

    def applied(rule: Rule, saved: Entries, vs: Entries) -> list[Array]:
        there = [v for v in vs if v is not None]
        return backend.apply_rule(rule, *saved[k:], *saved[:k], *there)

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        if given is not None:
            return given(saved[:k], dxs)
        return spread(applied(rules[0], saved, dxs), [o is not None for o in outs])

    def cotangent(saved: Entries, cts: Entries) -> list[Any]:
        return spread(applied(rules[1], saved, cts), moving)

    return replace(
        linearized,
        saves=(*linearized.saves, *range(n)),
        tangent_only=0,
        written=linearized.cotangent,
        tangent=tangent,
        cotangent=cotangent,
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _MapRule(Rule):
    """A rule for the vjp or jvp of a host function, with the same checks as the rule `host`."""

    host: Rule

    @property
    def origin(self) -> Any:
        return self.host.origin


@dataclass(eq=False)
class _KernelMaps:
    """Stores bwd and its transpose as rules with the operands `[*xs, *saved, *vectors]`.

    `pull` is bwd as a function of x, the residuals and the cotangents c. `pull` is linear in c, and
    is the gradient of Re<c, f(x)> with respect to x. `push` is the transpose of `pull` with respect
    to c. The vectors are the cotangents of `pull` or the tangents of `push`.
    """

    host: HostFunction
    specialized: Specialization
    saves: tuple[int, ...]
    bwd: Any
    moving: tuple[bool, ...]
    outs: tuple[Any, ...]

    def __post_init__(self) -> None:
        host = self.host
        self.backend = host._backend
        self.n, self.k = len(self.moving), len(self.saves)
        name, saved = host.__name__, tuple(range(self.n, self.n + self.k))
        rule = partial(_MapRule, host=self.specialized.rule, nondifferentiable=saved)
        rule = partial(rule, user_functions=(host.fwd, host.bwd))
        self.pull = rule(f"{name}'s vjp", self.pulled, self.d_pulled, self.of_pulled)
        self.push = rule(f"{name}'s jvp", self.pushed, self.d_pushed, self.of_pushed)

    def parted(self, operands: Entries) -> tuple[Any, Any, Any]:
        """Splits the operands into `(xs, residuals, vectors)`."""
        n, k = self.n, self.k
        return operands[:n], operands[n : n + k], operands[n + k :]

    def moved(self, xs: Entries) -> list[Any]:
        """Returns the entries of xs that belong to floating and complex inputs."""
        return [x for x, m in zip(xs, self.moving, strict=True) if m]

    # --- pull: cotangents of y to cotangents of x

    def pulled(self, *operands: Array) -> list[Array]:
        xs, saved, cts = self.parted(operands)
        result = self.bwd(saved, spread(cts, [o is not None for o in self.outs]))
        return [
            self.backend.zeros_like(x) if ct is None else ct
            for x, ct in zip(self.moved(xs), self.moved(result), strict=True)
        ]

    def evaluated(self, xs: Entries, values: Entries, cts: Entries) -> list[Array]:
        """Evaluates `pulled` at the differentiated inputs `values`; recomputes the residuals."""
        at = everything = replaced_where(xs, self.moving, values)
        if any(i >= self.n for i in self.saves):
            result = self.specialized.linearize(*at)
            everything = [*at, *result.ys, *result.extras]
        saved = [everything[i] for i in self.saves]
        return self.pulled(*at, *saved, *cts)

    def d_pulled(self, operands: Entries, moved: Entries) -> list[Any]:
        xs, _, cts = self.parted(operands)

        def along(at: Entries, dxs: Entries) -> list[Array]:
            run = lambda *values: self.evaluated(xs, values, cts)
            if not self.host.opaque:
                try:
                    return self.backend.attempt(partial(self._pushed, run), *at, *dxs)
                except MissingRuleError:
                    self.host.opaque = True
            return self.backend.pull(run, at, dxs)

        return self._differentiated(self.pull, operands, moved, along)

    def _differentiated(
        self, rule: Rule, operands: Entries, moved: Entries, along: Callable[..., list[Array]]
    ) -> list[Any]:
        """Returns the tangents of `pull` or `push`, which are linear in the vectors.

        along: `along(at, dxs)` is the derivative of the rule along tangents of the differentiated
            inputs.
        """
        xs, saved, vs = self.parted(operands)
        dxs, _, dvs = self.parted(moved)
        terms = []
        if any(dv is not None for dv in dvs):
            filled = self.backend.filled(dvs, vs)
            terms.append(self.backend.apply_rule(rule, *xs, *saved, *filled))
        if any(dx is not None for dx in dxs):
            at = self.moved(xs)
            terms.append(along(at, self.backend.filled(self.moved(dxs), at)))
        return [total(parts) for parts in zip(*terms, strict=True)]

    def _pushed(self, run: Any, *both: Array) -> list[Array]:
        half = len(both) // 2
        return self.backend.push(run, both[:half], both[half:])

    def of_pulled(self, operands: Entries, cotangents: Entries) -> list[Any]:
        xs, _, cts = self.parted(operands)
        at = self.moved(xs)
        dxs, dcts = self.back(xs, at, cts, cotangents)
        return [*spread(dxs, self.moving), *[None] * self.k, *dcts]

    def back(self, xs: Entries, at: Entries, cts: Entries, vs: Entries) -> Any:
        """Applies the pullback of `pulled` to vs; returns cotangents of inputs and of `cts`."""
        run = lambda *values: self.evaluated(xs, values[: len(at)], values[len(at) :])
        result = self.backend.pull(run, [*at, *cts], vs)
        return result[: len(at)], result[len(at) :]

    # --- push: tangents of x to tangents of y

    def pushed(self, *operands: Array) -> list[Array]:
        xs, saved, dxs = self.parted(operands)
        pull = lambda at, *cts: self.backend.apply_rule(self.pull, *at, *cts)
        try:
            return self.transposed(pull, [*xs, *saved], dxs)
        except MissingRuleError:  # bwd calls a kernel without a rule, possibly on residuals only
            plain = lambda at, *cts: self.pulled(*at, *cts)
            return self.transposed(plain, [*xs, *saved], dxs)

    def transposed(self, pull: Any, at: Entries, dxs: Entries) -> list[Array]:
        zeros = self.zero_cotangents(dxs[0])
        return self.backend.transpose(self.push, "cotangent", pull, list(at), zeros, list(dxs))

    def zero_cotangents(self, like: Array) -> list[Array]:
        """Returns zeros for each differentiated output."""
        return [self.backend.zeros(aval, like) for aval in self.outs if aval is not None]

    def d_pushed(self, operands: Entries, moved: Entries) -> list[Any]:
        xs, _, dxs = self.parted(operands)
        pull = lambda at, *cts: self.evaluated(at[: self.n], at[self.n :], cts)
        run = lambda *values: self.transposed(pull, [*xs, *values], dxs)
        along = lambda at, steps: self.backend.attempt(partial(self._pushed, run), *at, *steps)
        return self._differentiated(self.push, operands, moved, along)

    def of_pushed(self, operands: Entries, cotangents: Entries) -> list[Any]:
        """Applies the pullback of `pushed`.

        Since <v, J dx> = <bwd(x, v), dx>, the gradient with respect to x is the pullback of dx
        through bwd.
        """
        xs, saved, dxs = self.parted(operands)
        vs = self.backend.filled(cotangents, self.zero_cotangents(dxs[0]))
        at = self.moved(xs)
        of_xs, _ = self.back(xs, at, vs, dxs)
        of_dxs = self.backend.apply_rule(self.pull, *xs, *saved, *vs)
        return [*spread(of_xs, self.moving), *[None] * self.k, *of_dxs]
