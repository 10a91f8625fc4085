"""Implements `implicit_solution`, which differentiates the solution of an equation.

z solves F(z, p) = 0. With A = dF/dz and B = dF/dp at the solution,

    dz = -A^-1 B dp        p' = -B^H A^-H z'

so a tangent or a cotangent requires one linear solve with A or A^H, for any method that computes z.
The linear solve x = A^-1 b is differentiated by the rule dx = A^-1 (db - dA x), at any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from math import nan, prod
from typing import Any

from gradtools.arguments.checks import check_function
from gradtools.arguments.marks import here
from gradtools.arguments.wording import describe, in_words
from gradtools.backend import Array, Backend, Operators
from gradtools.boundary import like_function
from gradtools.custom_rules import CustomRule
from gradtools.derivatives import Derivatives
from gradtools.errors import GradtoolsError, noted
from gradtools.integrations.containers import is_same

LinearSolve = str | Callable[[Callable[[Array], Array], Array], Array]
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_SOLVERS = ("gmres", "cg", "dense")


class Implicit(Operators):
    """The operator `implicit_solution`."""

    def implicit_solution(
        self,
        F: Callable[..., Any],
        solve: Callable[..., Any],
        linear_solve: LinearSolve = "gmres",
        has_aux: bool = False,
    ) -> Callable[..., Any]:
        """Returns z with F(z, theta, *args) = 0 as a differentiable function of theta and args.

        The derivatives are computed by the implicit function theorem: each tangent or cotangent
        requires one linear solve, at every order. The derivatives do not depend on the method by
        which `solve` computes z.

        Args:
            F: The function in the equation. F takes z, theta and args, and returns a pytree like z.
                For a fixed point of g, pass `F = lambda z, *a: g(z, *a) - z`; for a minimum of h,
                pass `F = gt.grad(h)`. F may also close over differentiated arrays and modules. An
                argument that does not reach F's result is disconnected from z, as in `grad`.
            solve: `solve(theta, *args)` returns z, a pytree of floating or complex arrays. `solve`
                is called once, with arguments whose gradient is stopped, and may be an optimizer, a
                `while_loop`, or, through `to_numpy` or `host_function`, a SciPy function.
            linear_solve: The solver for A x = b: "gmres"; "cg" if A = dF/dz is symmetric
                (Hermitian) and positive or negative definite, as at a minimum; "dense" to use A as
                a matrix; or a function `(matvec, b) -> x`. b and x are real vectors of all entries
                of z, with real and imaginary parts for complex entries.
            has_aux: Whether solve returns `(z, aux)`; aux is returned without derivatives.

        Returns:
            A function of theta, args and keyword arguments that returns z, or `(z, aux)`.

        Raises:
            GradtoolsError: (When called) F's result differs from z in structure or shapes; F is not
                near zero at z: a change of z by 1% changes F by less than the norm of F. (When
                differentiated) the relative residual of the linear solve is above 1e-6 (1e-3 below
                float64), for example because A is singular. Under jit and vmap, the result is NaN
                in place of the last two errors.

        Example:
            >>> root = gt.implicit_solution(lambda z, a: z * z - a, lambda a: a ** 0.5)
            >>> a = gt.asarray(np.float32(4.0))
            >>> float(root(a)), float(gt.grad(root)(a))
            (2.0, 0.25)

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 15; Blondel et al.,
        Efficient and modular implicit differentiation, NeurIPS 2022.
        """
        check_function("implicit_solution", F, "F", curried=False)
        check_function("implicit_solution", solve, "solve", curried=False)
        _check_order(F, solve)
        if not callable(linear_solve) and linear_solve not in _SOLVERS:
            raise GradtoolsError(
                f"implicit_solution: linear_solve is {linear_solve!r}; expected 'gmres', 'cg', "
                "'dense' or a function (matvec, b) -> x."
            )
        solution = _Solution(self._backend, F, solve, linear_solve, has_aux)
        call = partial(self._backend.compiler.uncompiled, solution.at)
        doc = "Solution of an equation, found by {}, as a differentiable function."
        return like_function("implicit_solution(", solve, call, ")", doc)


def _check_order(F: Any, solve: Any) -> None:
    """Raises an error if F has too few parameters for z and the arguments that solve requires."""
    try:
        of_F, of_solve = ([*signature(f).parameters.values()] for f in (F, solve))
    except (TypeError, ValueError):  # a builtin may lack a signature
        return
    required = [p for p in of_solve if p.default is p.empty and p.kind not in _VARIABLE]
    if len(of_F) <= len(required) and not any(p.kind in _VARIABLE for p in of_F):
        taken = [", ".join(p.name for p in ps) for ps in (of_F, of_solve)]
        raise GradtoolsError(
            f"implicit_solution: F takes ({taken[0]}) and solve takes ({taken[1]}), but F must "
            "take z and the arguments of solve. F comes first: implicit_solution(F, solve)."
        )


@dataclass(frozen=True)
class _Form:
    """F, and the structure, shapes and dtypes of z, whose entries form the real vector x."""

    F: Callable[..., Any]  # takes the captured arrays, then the arguments of F
    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    captures: bool = False

    @property
    def dtype(self) -> str:
        return "float64" if {"float64", "complex128"} & {*self.dtypes} else "float32"


class _Closed(CustomRule):
    """A custom rule whose functions do not close over differentiated arrays."""

    def __init__(self, backend: Backend, fun: Any, static_argnames: Any) -> None:
        super().__init__(backend, fun, static_argnames)
        self.__name__ = "implicit_solution"

    def _user_functions(self, specialized: Any) -> tuple[Any, ...]:
        return ()

    def _is_transient(self, statics: tuple[Any, ...]) -> bool:
        form: _Form = statics[0]
        return form.captures


class _Solution:
    """An equation F(z, *args, **kwargs) = 0 and its differentiable solution z.

    p = (captured, args, kwargs), where captured contains the arrays that F closes over.
    """

    def __init__(
        self, backend: Backend, F: Any, solve: Any, linear_solve: LinearSolve, has_aux: bool
    ) -> None:
        self.backend, self.F, self.solve = backend, F, solve
        self.linear_solve, self.has_aux = linear_solve, has_aux
        self.derivatives = Derivatives(backend)
        self.plain = lambda captured, *args, **kwargs: F(*args, **kwargs)
        self.root = _Closed(backend, _root, "form")
        self.root.defvjp(self._root_fwd, self._root_bwd)
        self.root.defjvp(self._root_jvp)
        self.inverse = _Closed(backend, self._inverse, ("form", "adjoint"))
        self.inverse.defvjp(self._inverse_fwd, self._inverse_bwd)
        self.inverse.defjvp(self._inverse_jvp)

    def at(self, *args: Any, **kwargs: Any) -> Any:
        """Returns z, or `(z, aux)`, for the given arguments."""
        with here.refusing("implicit_solution"):  # rules differentiate F and solve
            form, x, captured, aux = self.backend.apart(self._solved, args, kwargs)
            p = self._connected(form, x, (captured, args, kwargs))
        z = self._tree(form, self.root(form, x, p))
        return (z, aux) if self.has_aux else z

    def _connected(self, form: _Form, x: Array, p: Any) -> Any:
        """Stops the gradient of the leaves of p that do not reach F's result.

        Such a leaf is then disconnected from z for every operator.
        """
        at, moving = self._moving(partial(self._F, form, x), p)[1:]
        reached = iter(self.backend.reached(lambda *xs: ([at([*xs])], []), moving))
        leaves, treedef = self.backend.flatten(p)
        stop = lambda x: self._moves(self.backend.as_leaf(x)) and not next(reached)
        leaves = [
            self.backend.apart(self.backend.stop_gradient, x) if stop(x) else x for x in leaves
        ]
        return self.backend.unflatten(treedef, leaves)

    def _solved(self, args: Any, kwargs: Any) -> tuple[_Form, Array, list[Array], Any]:
        """Calls `solve` without derivatives; returns `(form, x, captured, aux)`.

        x is the vector of the entries of z. captured contains the arrays that F closes over, which
        become arguments of the custom rules.
        """
        backend, xp = self.backend, self.backend.xp
        leaves, treedef = backend.flatten((args, kwargs))
        leaves = [backend.stop_gradient(x) if backend.is_array(x) else x for x in leaves]
        args, kwargs = backend.unflatten(treedef, leaves)
        z, aux = self.solve(*args, **kwargs), None
        if self.has_aux:
            if not isinstance(z, (tuple, list)) or len(z) != 2:
                raise GradtoolsError(
                    "implicit_solution: with has_aux=True solve must return (z, aux), got "
                    f"{describe(backend, z)}. Return both, or leave has_aux out."
                )
            z, aux = z
        leaves, treedef = backend.flatten(z)
        leaves = [backend.as_leaf(x) for x in leaves]  # solve may return NumPy arrays
        if not leaves:
            raise GradtoolsError(
                f"implicit_solution: solve returned {describe(backend, z)}; expected z, a pytree "
                "of floating or complex arrays. Is a return statement missing?"
            )
        for x, path in zip(leaves, backend.leaf_paths(z), strict=True):
            if not (backend.is_array(x) and backend.is_inexact(x)):
                aux = "" if self.has_aux else " If solve returns (z, aux), pass has_aux=True."
                raise GradtoolsError(
                    f"implicit_solution: solve returned {describe(backend, x)} at z{path}; "
                    f"expected a floating or complex array.{aux}"
                )
        shapes = tuple([tuple(x.shape) for x in leaves])
        form = _Form(self.plain, treedef, shapes, tuple([backend.dtype_name(x) for x in leaves]))
        x = backend.stop_gradient(self._vector(form, leaves))
        F, captured = backend.closure_converted(self.F, self._tree(form, x), *args, **kwargs)
        form = replace(form, F=F, captures=True) if captured else form
        p = captured, args, kwargs
        size, there = xp.abs(x), self._F(form, x, p)
        mean = xp.mean(size)
        moved = x + 0.01 * (size + xp.where(mean > 0, mean, xp.ones_like(mean)))
        moved = self._F(form, moved, p)
        far = self._norm(there) > self._norm(moved - there)
        x = self._unless(
            backend.stop_gradient(far), x, lambda:
            "F is not near zero at the z that solve returned: changing z by 1% changes F by "
            "less than |F|. Let solve converge further, or check that solve computes a zero of F. "
            "F takes z first; for a fixed point z = g(z, *args) pass "
            "F = lambda z, *a: g(z, *a) - z.",
        )  # fmt: skip
        return form, x, captured, aux

    # --- derivatives of x as a function of p

    def _root_fwd(self, form: _Form, x: Array, p: Any) -> Any:
        x = self.root(form, x, p)
        return x, (x, p)

    def _root_bwd(self, form: _Form, residuals: Any, c: Array) -> Any:
        x, p = residuals
        u = self.inverse(form, True, x, p, c)
        return None, self._pulled(partial(self._F, form, x), p, -u)

    def _root_jvp(self, form: _Form, primals: Any, tangents: Any) -> Any:
        x, p = self.root(form, *primals), primals[1]
        moved = self._pushed(partial(self._F, form, x), p, tangents[1])
        return x, self.inverse(form, False, x, p, -moved)

    # --- the solution v of A v = b (adjoint: A^H v = b) as a function of x, p and b

    def _inverse(self, form: _Form, adjoint: bool, x: Array, p: Any, b: Array) -> Array:
        F = lambda x: self._F(form, x, p)
        if adjoint:
            pull = self.derivatives.vjp(F, x)[1]
            product = lambda v: pull(v)[0]
        else:
            product = self.derivatives.linearize(F, x)[1]
        v = self._linear_solution(product, b)
        tolerance = 1e-6 if form.dtype == "float64" else 1e-3
        xp, right = self.backend.xp, self._norm(b)
        v = xp.where(right == 0, xp.zeros_like(b), v)  # the solver's result for b = 0 is ignored
        left = self._norm(product(v) - b)
        explain = lambda: (
            f"the relative residual of the linear solve is above {tolerance:.0e}. "
            f"{self._unsolved(product, b)}"
        )
        return self._unless(~(left <= tolerance * right), v, explain)

    def _linear_solution(self, product: Callable[[Array], Array], b: Array) -> Array:
        """Calls `linear_solve`; raises an error if its result is neither like b nor a scalar."""
        backend, solver = self.backend, self.linear_solve
        if not callable(solver):
            return getattr(backend, solver)(product, b)
        note = (
            "implicit_solution calls linear_solve(matvec, b): matvec is a function that computes "
            f"A x, and b is {describe(backend, b)}. It must return x with A x = b."
        )
        v = backend.as_leaf(noted(note, solver, product, b))
        if not backend.is_array(v) or tuple(v.shape) not in (tuple(b.shape), ()):
            pair = " For a solver that returns (x, info) pass lambda A, b: solver(A, b)[0]."
            raise GradtoolsError(
                f"implicit_solution: linear_solve returned {describe(backend, v)}; it must return "
                f"x with the shape {tuple(b.shape)} of b.{pair if isinstance(v, tuple) else ''}"
            )
        return v

    def _unsolved(self, product: Callable[[Array], Array], b: Array) -> str:
        """Returns the probable reason why A x = b was not solved."""
        xp, moved = self.backend.xp, product(b)
        if not bool(xp.all(xp.isfinite(b))):
            return (
                "The right-hand side (the incoming gradient or tangent) contains NaN or infinity."
            )
        if not bool(xp.all(xp.isfinite(moved))):
            return (
                "dF/dz contains NaN or infinity at the z that solve returned, or F itself does. "
                "Check F there: for example, sqrt has an infinite derivative at 0."
            )
        if self.linear_solve == "dense":
            return "dF/dz may be singular."
        skew = xp.sum(b * product(moved)) - xp.sum(moved * moved)  # 0 for a symmetric dF/dz
        if self.linear_solve == "cg" and bool(xp.abs(skew) > 1e-3 * xp.sum(moved * moved)):
            return "'cg' needs a symmetric dF/dz, and dF/dz is not symmetric; use 'gmres'."
        return (
            "dF/dz may be singular; 'dense' solves small systems; a function (matvec, b) -> x may "
            "use a preconditioner or more iterations."
        )

    def _product(self, form: _Form, adjoint: bool, v: Array, at: Any) -> Array:
        """Computes A v or A^H v at `at = (x, p)`."""
        F = lambda x: self._F(form, x, at[1])
        if adjoint:
            return self.derivatives.vjp(F, at[0])[1](v)[0]
        return self.derivatives.jvp(F, (at[0],), (v,))[1]

    def _inverse_fwd(self, form: _Form, adjoint: bool, x: Array, p: Any, b: Array) -> Any:
        v = self.inverse(form, adjoint, x, p, b)
        return v, (x, p, v)

    def _inverse_bwd(self, form: _Form, adjoint: bool, residuals: Any, c: Array) -> Any:
        x, p, v = residuals
        u = self.inverse(form, not adjoint, x, p, c)
        return *self._pulled(partial(self._product, form, adjoint, v), (x, p), -u), u

    def _inverse_jvp(self, form: _Form, adjoint: bool, primals: Any, tangents: Any) -> Any:
        v = self.inverse(form, adjoint, *primals)
        product = partial(self._product, form, adjoint, v)
        moved = self._pushed(product, primals[:2], tangents[:2])
        return v, self.inverse(form, adjoint, *primals[:2], tangents[2] - moved)

    # --- trees and vectors

    def _F(self, form: _Form, x: Array, p: Any) -> Array:
        """Evaluates F as a map from real vectors x to real vectors."""
        F = form.F(p[0], self._tree(form, x), *p[1], **p[2])
        leaves, treedef = self.backend.flatten_like(form.treedef, F)
        if not is_same(treedef, form.treedef) or [tuple(y.shape) for y in leaves] != [*form.shapes]:
            scalar = self.backend.is_array(F) and tuple(F.shape) == ()
            fix = " For z at a minimum of h, pass F = gt.grad(h)." if scalar else ""
            raise GradtoolsError(
                f"implicit_solution: F returns {describe(self.backend, F)}; expected the structure "
                f"and shapes of z, {in_words(form.treedef)} with the shapes {[*form.shapes]}.{fix}"
            )
        return self._vector(form, leaves)

    def _vector(self, form: _Form, leaves: list[Array]) -> Array:
        backend, parts = self.backend, list[Array]()
        for x in leaves:
            pair = [backend.xp.real(x), backend.xp.imag(x)] if backend.is_complex(x) else [x]
            parts += [backend.cast(part.reshape(-1), form.dtype) for part in pair]
        return backend.xp.concatenate(parts)

    def _tree(self, form: _Form, x: Array) -> Any:
        leaves, start = [], 0
        for shape, dtype in zip(form.shapes, form.dtypes, strict=True):
            parts = []
            for _ in range(1 + dtype.startswith("complex")):
                parts.append(x[start : start + prod(shape)].reshape(shape))
                start += prod(shape)
            y = parts[0] if len(parts) == 1 else parts[0] + 1j * parts[1]
            leaves.append(self.backend.cast(y, dtype))
        return self.backend.unflatten(form.treedef, leaves)

    def _pulled(self, fun: Any, tree: Any, c: Array) -> Any:
        """Applies the pullback of fun to c; returns a tree with None at integers and non-arrays."""
        leaves, at, moving = self._moving(fun, tree)
        pulled = self.derivatives.vjp(at, moving)[1](c)[0] if moving else []
        left, treedef = iter(pulled), self.backend.flatten(tree)[1]
        full = [next(left) if self._moves(x) else None for x in leaves]
        return self.backend.unflatten(treedef, full)

    def _pushed(self, fun: Any, tree: Any, tangents: Any) -> Array:
        leaves, at, moving = self._moving(fun, tree)
        dxs = self.backend.flatten(tree)[1].flatten_up_to(tangents)
        pairs = zip(leaves, dxs, strict=True)
        tangent = [
            self.backend.zeros_like(x) if d is None else d for x, d in pairs if self._moves(x)
        ]
        if not moving:
            return self.backend.zeros_like(fun(tree))
        return self.derivatives.jvp(at, (moving,), (tangent,))[1]

    def _moving(self, fun: Any, tree: Any) -> tuple[list[Any], Callable[[list[Array]], Any], Any]:
        leaves, treedef = self.backend.flatten(tree)
        leaves = [self.backend.as_leaf(x) for x in leaves]  # JAX's rules may pass NumPy arrays

        def at(moving: list[Array]) -> Any:
            left = iter(moving)
            full = [next(left) if self._moves(x) else x for x in leaves]
            return fun(self.backend.unflatten(treedef, full))

        return leaves, at, [x for x in leaves if self._moves(x)]

    def _moves(self, x: Any) -> bool:
        return self.backend.is_array(x) and self.backend.is_inexact(x)

    def _norm(self, x: Array) -> Array:
        return self.backend.xp.sqrt(self.backend.xp.sum(x * x))

    def _unless(self, wrong: Array, x: Array, text: Callable[[], str]) -> Array:
        """Returns x if `wrong` is false; otherwise raises an error, or returns NaN in a trace."""
        xp = self.backend.xp
        if self.backend.is_traced(wrong):
            return xp.where(wrong, xp.full_like(x, nan), x)
        if bool(wrong):
            raise GradtoolsError(f"implicit_solution: {text()}")
        return x


def _root(form: _Form, x: Array, p: Any) -> Array:
    return 1 * x  # a copy, so that the output and the argument are different residuals
