"""Computes the mixed partial derivative (d/dy) <u, (d/dz) f(y, G(z))> without a graph of G."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradtools.arguments.calls import Call, call_of_primals
from gradtools.arguments.checks import check_function
from gradtools.arguments.marks import ChunkedCall, here
from gradtools.arguments.wording import describe
from gradtools.backend import Array, Fun, Operators, R, T
from gradtools.errors import GradtoolsError
from gradtools.jacobians import gradient_at, second_order_mode


class MixedPartials(Operators):
    """The operator `mixed_partial`."""

    def mixed_partial(
        self, f: Callable[[Any, R], Any], G: Callable[[T], R], y: Any, z: T, u: Any
    ) -> Any:
        """Computes (d/dy) <u, (d/dz) f(y, G(z))> with forward mode through G, which keeps no graph.

        With J the Jacobian of G at z and w = J u, <u, (d/dz) f(y, G(z))> = <w, (d/dg) f(y, g)> at g
        = G(z). G is therefore evaluated once in forward mode, and only f is differentiated twice.
        The memory use does not grow with the depth of G. The result is differentiable, also with
        respect to z, u and the arrays that G captures; in PyTorch, differentiating the result
        evaluates G again.

        Several directions share one evaluation of f. In JAX all directions also share one
        evaluation of G; in PyTorch G runs once per direction, each time with the same random
        streams and buffers.

        Args:
            f: A real scalar function of y and of G's result.
            G: A function of z that supports forward mode; PyTorch's fused attention, which has no
                forward mode, is replaced by plain operations. If G contains other operations
                without forward mode, use `grad` through `frozen(G)` instead.
            y: A pytree of floating or complex arrays.
            z: A pytree of floating or complex arrays, the argument of G.
            u: The direction, a pytree like z, or a list of such pytrees.

        Returns:
            A pytree like y, or a list of such pytrees.

        Raises:
            GradtoolsError: u does not match z; G has no forward mode; in PyTorch, the result is
                differentiated and G returns a different value when evaluated again.

        Example:
            >>> y, z, u = (gt.asarray(np.float32(v)) for v in (2.0, 3.0, 1.0))
            >>> float(gt.mixed_partial(lambda y, g: (y * g) ** 2, lambda z: z * z, y, z, u))
            432.0

        Source: forward over reverse, as in Pearlmutter, Fast exact multiplication by the Hessian,
        1994, with the pushforward taken through G only.
        """
        check_function("mixed_partial", f, curried=False)
        check_function("mixed_partial", G, "G", curried=False)
        single = (
            not isinstance(u, list) or self._backend.flatten(u)[1] == (self._backend.flatten(z)[1])
        )
        try:
            if single:
                return self._mixed_partials(f, G, y, z, [u], ["u"])[0]
            # Runs outside of compiled code, where random state can be reset for each direction.
            names = [f"u[{k}]" for k in range(len(u))]
            return self._backend.compiler.uncompiled(self._mixed_partials, f, G, y, z, u, names)
        except TypeError as error:
            error.add_note("mixed_partial calls G(z) and f(y, G(z)).")
            raise

    def _mixed_partials(
        self, f: Any, G: Any, y: Any, z: Any, us: list[Any], names: Sequence[str]
    ) -> list[Any]:
        """Returns the mixed partial derivatives along each direction of `us`."""
        if not us:
            return []
        backend = self._backend
        run = G
        if here.tape is not None:  # a recomputation of G in PyTorch uses the same marks
            place = ChunkedCall("mixed_partial")

            def run(z: Any) -> Any:
                with place.at(0):
                    return G(z)

        of_z = call_of_primals(backend, "mixed_partial", run, (z,), names=("z",))
        of_z.function = "G"
        directions = [of_z.from_trees((u,), name) for u, name in zip(us, names, strict=True)]
        outs, extras, pushed = backend.jvps(of_z, of_z.leaves, directions)  # G(z) and J u
        g = of_z.output(outs, extras)[0]
        if not outs:
            hint = " Is a return statement missing?" if g is None else ""
            raise GradtoolsError(
                "mixed_partial: G must return a floating or complex array; got "
                f"{describe(backend, g)}.{hint}"
            )
        ws = [of_z.tangent_output(dys) for dys in pushed]
        call = call_of_primals(backend, "mixed_partial", f, (y, g), names=("y", "G(z)"))
        count = call.counts[0]
        many = [[x for x in backend.flatten(w)[0] if x is not None] for w in ws]
        mode, fun = second_order_mode(call, "auto")
        if mode == "forward_over_reverse":
            by_y = _partial_of(call, fun, 0)
            rows = backend.jvps(by_y, call.leaves[count:], many)[2]
        else:
            by_g = _partial_of(call, fun, 1)
            evaluation = backend.vjp(by_g, call.leaves[:count], groups=None, once=len(many) == 1)
            rows = [backend.filled(evaluation.pullback(w), call.leaves[:count]) for w in many]
        call.refuse_changes()
        return [call.to_trees([*row, *call.leaves[count:]])[0] for row in rows]


def _partial_of(call: Call, fun: Fun, which: int) -> Fun:
    """Returns f's gradient with respect to argument `which` as a function of the other argument."""
    count = call.counts[0]
    leaves = call.leaves[:count] if which == 0 else call.leaves[count:]

    def gradient(*others: Array) -> tuple[list[Array], list[Array]]:
        def restricted(*xs: Array) -> tuple[list[Array], list[Array]]:
            return fun(*xs, *others) if which == 0 else fun(*others, *xs)

        restricted.caller, restricted.call = call.caller, call  # type: ignore[attr-defined]
        restricted.first = count if which else 0  # type: ignore[attr-defined]
        return gradient_at(call, restricted, leaves, leaves)[0], []

    gradient.caller, gradient.call = call.caller, call  # type: ignore[attr-defined]
    gradient.first = 0 if which else count  # type: ignore[attr-defined]
    return gradient
