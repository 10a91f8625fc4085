"""The public operator that writes derivatives as mathematics: `formula`.

A backend records one run of f as expressions, and `derive`
transforms them to the adjoint program. No framework takes part in that; only operations without an
algebra are left to it. Before the formula is returned it is evaluated in NumPy at random points
near the arguments and compared with the framework's own automatic differentiation of f: reverse
mode, and at order 2 reverse mode of reverse mode. All of this runs in float64 and complex128 where
f supports them, else in f's own precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from gradtools.arguments.checks import order_among
from gradtools.backend import Operators, P
from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.comparing import formulated
from gradtools.seeing.formulas.derivation import Formula
from gradtools.seeing.frameworks import Framework
from gradtools.seeing.graphs.program import LeafProgram, spoken


class Formulating(Operators):
    """The operator `formula`, bound to one backend."""

    def formula(
        self,
        f: Callable[P, Any],
        *args: Any,
        order: int = 1,
        argnums: int | tuple[int, ...] = 0,
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
        Convolutions, linear algebra, loops and other operations for which the formula has no
        algebra keep their names, and their adjoints are their vjps.

        Args:
            f: Takes and returns pytrees of arrays; a module, too. Inputs are called as f calls
                its parameters.
            *args: Arguments of f; arrays of any shape and dtype.
            order: 1, or 2 with the double backward.
            argnums: The position of the argument to which it is differentiated, or of several; its
                leaves are floating or complex. In PyTorch parameters that f holds and that require
                grad are differentiated as well, and ``argnums=()`` means these alone.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Formula`: ``str()`` for terminals, ``.latex()`` for papers, and by itself in
            notebooks; ``.marked`` are the operations that are written by their names, ``.check``
            is the record of the comparison, and ``.agrees_with(derivation)`` compares a
            derivation by hand with the framework's vjp.

        Raises:
            GradtoolsError: order is not 1 or 2; argnums is out of range or names an integer
                argument; f raises, returns no array, or what it computes cannot be differentiated
                by the framework; the formula and automatic differentiation differ (which would be a
                bug in gradtools; the error shows both values).

        Example:
            >>> w, x = gt.asarray(np.ones((2, 3), "f")), gt.asarray(np.ones(3, "f"))
            >>> found = gt.formula(lambda W, x: W @ x, w, x, argnums=(0, 1))
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
                "formula: called inside of a transform (vmap, grad) or of compiled code, where "
                "arrays have no values. Call it outside, on the function itself."
            )
        program = LeafProgram(self._backend, "formula", f, args, kwargs, argnums).with_values()
        program.names = _leaf_names(f, program.names)
        return formulated(program, order)


def _leaf_names(f: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """The paths of the leaves, with f's own names of its parameters; x where it has none."""
    alone = not any("argument 1" in name for name in names)
    return [re.sub(r"^argument (\d+)", "x" if alone else r"x\1", n) for n in spoken(f, names)]
