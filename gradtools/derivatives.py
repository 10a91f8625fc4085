"""Implements first-order derivative operators with a backend's vjp, jvp and linearize.

Every operator in this module computes one of two maps. With J the Jacobian of f at x and Re<u, v>
the inner product, these maps are

    pushforward  t -> J t          pullback  c -> J^H c          Re<c, J t> = Re<J^H c, t>

The gradient of a real-valued f is J^H 1, which for complex x is df/dRe + i df/dIm: for a small
learning rate, the step `x - lr * grad` decreases f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Literal, TypeVar, get_args, overload

from gradtools.arguments.batches import Batch
from gradtools.arguments.calls import NOT_NAMED, Call, GradientSpec, call_of_primals
from gradtools.arguments.checks import (
    check_choice,
    check_function,
    normalized_argnums,
    refuse_arguments,
    refuse_axes,
    same_length,
    whole_or_none,
)
from gradtools.arguments.in_axes import arguments_of_call
from gradtools.backend import Operators, P, R, T
from gradtools.boundary import like_function
from gradtools.disconnected_inputs import check_connected, is_missing
from gradtools.errors import GradtoolsError
from gradtools.freezing import Freezing

if TYPE_CHECKING:
    from gradtools.gradient_types import Gradient, ValueAndGradient

A = TypeVar("A")
Argnums = int | Sequence[int]
Disconnected = Literal["raise", "warn", "zeros", "strict"]
GradMode = Literal["auto", "forward_over_reverse"]
_PLAYERS = "minimize or maximize"


class Derivatives(Operators):
    """The public operators that differentiate a function."""

    @overload
    def grad(
        self,
        f: Callable[P, Any],
        argnums: Sequence[int],
        has_aux: Literal[False] = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Callable[P, tuple[Any, ...]]: ...
    @overload
    def grad(
        self,
        f: Callable[P, Any],
        argnums: Argnums,
        has_aux: bool = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Callable[P, Any]: ...
    @overload
    def grad(
        self,
        f: Callable[Concatenate[T, P], Any],
        *,
        has_aux: Literal[False] = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Gradient[T, P]: ...
    @overload
    def grad(
        self,
        f: Callable[Concatenate[T, P], tuple[Any, A]],
        *,
        has_aux: Literal[True],
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Callable[Concatenate[T, P], tuple[T, A]]: ...
    def grad(
        self,
        f: Callable[..., Any],
        argnums: Argnums = 0,
        has_aux: bool = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Callable[..., Any]:
        """Creates a function that computes the gradient of a real scalar-valued f.

        f is evaluated once, and no `.grad` is changed. In JAX, f's Python code is traced again if
        a gradient may be zero because the output does not depend on the argument.

        Args:
            f: A function that takes pytrees of arrays and returns one real array of shape ().
            argnums: The positional arguments to differentiate with respect to, an integer or a
                tuple. An argument may be a whole module: a `torch.nn.Module` gives a dict of
                gradients by parameter name; an equinox or flax.nnx module gives the result of that
                library's grad.
            has_aux: Whether f returns `(output, aux)`; aux may be any object.
            disconnected_inputs: The action if no differentiable path connects an argument to the
                output: "raise", "warn", or "zeros". With "strict", an error is raised if an
                argument has a leaf on which the output does not depend. In JAX, a warning
                replaces the error if f cannot be traced.
            mode: How the gradient is differentiated. "auto": by the framework's double
                backward, which keeps the graphs of f and of its gradient. "forward_over_reverse":
                by a jvp of the gradient, which is recomputed from the arguments, so that an
                unrolled optimization stores the parameters of each step but no activations. f is
                wrapped in `frozen`: arrays and modules that it closes over are constants.

        Returns:
            A function of f's arguments that returns a pytree like the argument (a tuple of pytrees
            if argnums is a tuple), or `(grads, aux)`.

        Raises:
            GradtoolsError: (When called) the output is not a real scalar; a differentiated argument
                contains a leaf that is not a floating or complex array; argnums is out of range.
                With mode="forward_over_reverse", the errors of `frozen` may also be raised.
            DisconnectedInputError: (When called) the output does not depend on an argument, and
                `disconnected_inputs` is "raise" or "strict".

        Example:
            >>> x = {"w": gt.asarray(np.float32([1.0, 2.0]))}
            >>> g = gt.grad(lambda x: (x["w"] ** 2).sum())(x)
            >>> gt.to_numpy(g["w"]).tolist()
            [2.0, 4.0]
        """
        return self._gradient_of("grad", f, argnums, has_aux, disconnected_inputs, mode)

    @overload
    def value_and_grad(
        self,
        f: Callable[P, R],
        argnums: Sequence[int],
        has_aux: Literal[False] = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Callable[P, tuple[R, tuple[Any, ...]]]: ...
    @overload
    def value_and_grad(
        self,
        f: Callable[P, R],
        argnums: Argnums,
        has_aux: bool = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Callable[P, tuple[R, Any]]: ...
    @overload
    def value_and_grad(
        self,
        f: Callable[Concatenate[T, P], R],
        *,
        has_aux: Literal[False] = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> ValueAndGradient[T, P, R]: ...
    @overload
    def value_and_grad(
        self,
        f: Callable[Concatenate[T, P], tuple[R, A]],
        *,
        has_aux: Literal[True],
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> ValueAndGradient[T, P, tuple[R, A]]: ...
    def value_and_grad(
        self,
        f: Callable[..., Any],
        argnums: Argnums = 0,
        has_aux: bool = False,
        disconnected_inputs: Disconnected = "raise",
        mode: GradMode = "auto",
    ) -> Callable[..., Any]:
        """Creates a function that computes the value and the gradient of f in one evaluation.

        Args:
            f: See `grad`.
            argnums: See `grad`.
            has_aux: See `grad`.
            disconnected_inputs: See `grad`.
            mode: See `grad`.

        Returns:
            A function of f's arguments that returns `(value, grads)` or `((value, aux), grads)`.

        Raises:
            GradtoolsError: As in `grad`.
            DisconnectedInputError: As in `grad`.

        Example:
            >>> value, g = gt.value_and_grad(lambda x: x ** 2)(gt.asarray(np.float32(3.0)))
            >>> float(value), float(g)
            (9.0, 6.0)
        """
        return self._gradient_of("value_and_grad", f, argnums, has_aux, disconnected_inputs, mode)

    def minimax_value_and_grad(
        self,
        f: Callable[P, Any],
        minimize: Argnums,
        maximize: Argnums,
        has_aux: bool = False,
    ) -> Callable[P, tuple[Any, tuple[Any, ...]]]:
        """Creates a function that computes the value and all gradients of a minimax problem.

        The gradients of the maximizing players are negated, so every player is updated by `x - lr *
        grad` and ordinary optimizers can be used (GANs, domain-adversarial training).

        Args:
            f: See `grad`.
            minimize: The positions of the players that minimize f.
            maximize: The positions of the players that maximize f.
            has_aux: Whether f returns `(value, aux)`.

        Returns:
            A function of f's arguments that returns `(value, grads)` or `((value, aux), grads)`,
            with grads in ascending argnum order.

        Raises:
            GradtoolsError: As in `grad`; also if an argument is in both minimize and maximize.
            DisconnectedInputError: The output does not depend on a player.

        Example:
            >>> f = lambda x, y: x ** 2 - y ** 2
            >>> two = gt.asarray(np.float32(2.0))
            >>> value, grads = gt.minimax_value_and_grad(f, 0, 1)(two, two)
            >>> [float(g) for g in grads]
            [4.0, 4.0]

        Source: Goodfellow et al., Generative adversarial nets, 2014, for the objectives; Ganin and
        Lempitsky, Unsupervised domain adaptation by backpropagation, 2015, for the single pass.
        """
        name = "minimax_value_and_grad"
        down, up = (
            tuple(a) if isinstance(a, (tuple, list)) else (a,) for a in (minimize, maximize)
        )
        spec = GradientSpec(name, f, (*down, *up), has_aux, minimizing=len(down))
        refuse_arguments(name, spec.argnums, _PLAYERS)
        return derivative_function(name, f, spec.argnums, partial(self._gradient_at, spec))

    @overload
    def vjp(
        self, f: Callable[P, R], *primals: Any, has_aux: Literal[False] = False
    ) -> tuple[R, Callable[[Any], tuple[Any, ...]]]: ...
    @overload
    def vjp(
        self, f: Callable[P, tuple[R, A]], *primals: Any, has_aux: Literal[True]
    ) -> tuple[R, Callable[[Any], tuple[Any, ...]], A]: ...
    def vjp(self, f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
        """Computes the value of f and its pullback c -> J^H c in one evaluation.

        Args:
            f: A function that takes and returns pytrees of arrays.
            primals: Pytrees of arrays. Integer leaves are constants; their tangents and cotangents
                are None in PyTorch and zeros of dtype float0 in JAX, which also accepts None for a
                tangent.
            has_aux: Whether f returns `(output, aux)`.

        Returns:
            `(out, pullback)` or `(out, pullback, aux)`. The pullback takes a cotangent with the
            structure of out (entries at leaves that are not floating or complex are ignored) and
            returns a tuple with one pytree per primal, with zeros for a leaf on which the output
            does not depend. The pullback may be called many times. In JAX the pullback is a pytree,
            as in `jax.vjp`: it may be passed through jit and scan, and may be a residual of a rule.

        Raises:
            GradtoolsError: A leaf is not differentiable, or a cotangent does not match its output.

        Example:
            >>> out, pullback = gt.vjp(lambda x: x ** 2, gt.asarray(np.float32(3.0)))
            >>> (g,) = pullback(out)
            >>> float(out), float(g)
            (9.0, 54.0)

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 3.
        """
        call = call_of_primals(self._backend, "vjp", f, primals, has_aux, keeps_exact=True)
        result = self._backend.vjp(call, call.leaves, groups=None, once=False)
        out, aux = call.output(result.outs, result.extras)

        bare, likes = self._backend.outliving(call, result.outs, out)

        attach = call.attaching(self.vjp, f, *primals, has_aux=has_aux)

        def pullback(pull: Any, *cotangents: Any) -> tuple[Any, ...]:
            """Maps a cotangent of the output to a tuple with one entry for each primal."""
            if len(cotangents) != 1:
                raise GradtoolsError(
                    f"vjp: the pullback takes one cotangent, in the structure of f's output; got "
                    f"{len(cotangents)}. Pass a tuple of cotangents if f returns a tuple."
                )
            (cotangent,) = cotangents
            pulled = pull(bare.cotangents(cotangent, likes))
            grads = self._backend.filled(pulled, bare.leaves)
            trees = bare.to_trees(grads, bare.exact_tangents)
            return attach(trees, lambda result: result[1](cotangent))

        pulling = self._backend.linear_map(pullback, result.pullback)
        out, aux = attach((out, aux), lambda result: (result[0], result[2] if has_aux else None))
        return (out, pulling, aux) if has_aux else (out, pulling)

    @overload
    def jvp(
        self,
        f: Callable[P, R],
        primals: Sequence[Any],
        tangents: Sequence[Any],
        has_aux: Literal[False] = False,
    ) -> tuple[R, R]: ...
    @overload
    def jvp(
        self,
        f: Callable[P, tuple[R, A]],
        primals: Sequence[Any],
        tangents: Sequence[Any],
        has_aux: Literal[True],
    ) -> tuple[R, R, A]: ...
    def jvp(
        self,
        f: Callable[..., Any],
        primals: Sequence[Any],
        tangents: Sequence[Any],
        has_aux: bool = False,
    ) -> Any:
        """Computes the value of f and its tangent J t in forward mode, which keeps no graph.

        In PyTorch, f is evaluated on dual tensors; attention and norms use operations whose
        tangents are correct at every order. `torch.no_grad` does not stop these tangents
        (pytorch#128600): use `stop_gradient`, or `linearize`, which uses reverse mode. A dual
        tensor does not require grad, so code that tests `requires_grad`, as in
        `y if y.requires_grad else y.detach()`, drops the tangent without an error: use `linearize`;
        `gradtools.testing.checked` detects such code. PyTorch supports one level of dual numbers
        per process; if another derivative is using this level, the pullback is transposed instead.

        Args:
            f: A function that takes and returns pytrees of arrays.
            primals: One pytree of arrays for each argument; integers are constants, as in `vjp`.
            tangents: Pytrees with the structure, shapes and dtypes of the primals.
            has_aux: Whether f returns `(output, aux)`.

        Returns:
            `(out, tangent_out)` or `(out, tangent_out, aux)`; at leaves that are not floating or
            complex tangent_out is None in PyTorch and zeros of dtype float0 in JAX.

        Raises:
            GradtoolsError: A tangent differs from its primal in structure, shape or dtype; f
                contains an operation without forward mode (a reverse-only edit, a kernel without a
                forward rule).

        Example:
            >>> x, t = gt.asarray(np.float32(3.0)), gt.asarray(np.float32(1.0))
            >>> out, dout = gt.jvp(lambda x: x ** 2, (x,), (t,))
            >>> float(out), float(dout)
            (9.0, 6.0)

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 3.
        """
        primals, tangents = same_length("jvp", primals, tangents)
        call = call_of_primals(self._backend, "jvp", f, primals, has_aux, keeps_exact=True)
        flat_tangents = call.from_trees(tangents, "tangent")
        outs, extras, pushed = self._backend.jvp(call, call.leaves, flat_tangents)
        out, aux = call.output(outs, extras)
        tangent_out = call.tangent_output(pushed, call.no_tangents)
        result = (out, tangent_out, aux) if has_aux else (out, tangent_out)
        return call.attaching(self.jvp, f, primals, tangents, has_aux)(result)

    def linearize(self, f: Callable[P, R], *primals: Any) -> tuple[R, Callable[..., R]]:
        """Computes the value of f and its pushforward t -> J t in one evaluation.

        Args:
            f: A function that takes and returns pytrees of arrays.
            primals: Pytrees of arrays. Integer leaves are constants; their tangents and cotangents
                are None in PyTorch and zeros of dtype float0 in JAX, which also accepts None for a
                tangent.

        Returns:
            `(out, pushforward)`. The pushforward takes one tangent per primal and may be called
            many times. `linearize` uses as much memory as `vjp`; for a single tangent, `jvp` uses
            less memory.

        Raises:
            GradtoolsError: A leaf is not differentiable, or a tangent does not match its primal.

        Example:
            >>> out, pushforward = gt.linearize(lambda x: x ** 2, gt.asarray(np.float32(3.0)))
            >>> float(pushforward(gt.asarray(np.float32(1.0))))
            6.0

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 3.
        """
        call = call_of_primals(self._backend, "linearize", f, primals, keeps_exact=True)
        outs, extras, push = self._backend.linearize(call, call.leaves)

        (bare, _), expected = self._backend.outliving(call, outs), call.argnums
        attach = call.attaching(self.linearize, f, *primals)

        def pushforward(push: Any, *tangents: Any) -> Any:
            """Maps one tangent for each primal to the tangent of the output."""
            same_length("linearize", expected, tangents)
            pushed = push(bare.from_trees(tangents, "tangent"))
            tangent = bare.tangent_output(pushed, bare.no_tangents)
            return attach(tangent, lambda result: result[1](*tangents))

        out = attach(call.output(outs, extras)[0], lambda result: result[0])
        return out, self._backend.linear_map(pushforward, push)

    @overload
    def per_example_grad(
        self,
        f: Callable[Concatenate[T, P], Any],
        *,
        in_axes: Any = None,
        chunk_size: int | None = None,
    ) -> Gradient[T, P]: ...
    @overload
    def per_example_grad(
        self,
        f: Callable[P, Any],
        argnums: Argnums,
        in_axes: Any = None,
        chunk_size: int | None = None,
    ) -> Callable[P, Any]: ...
    def per_example_grad(
        self,
        f: Callable[..., Any],
        argnums: Argnums = 0,
        in_axes: Any = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Creates a function that computes one gradient for each example of a batch.

        Args:
            f: A real scalar function of one example, as in `grad`.
            argnums: The positional arguments to differentiate with respect to.
            in_axes: The axes that are split, as in `vmap`: an integer, one entry for each
                positional argument, or a dict from f's parameters to axes, where None shares an
                argument. If None, the arguments in argnums are shared, and every array of the other
                arguments is split along axis 0. Arguments without an entry, including keyword
                arguments, are split along axis 0; arrays of shape () and non-arrays are shared.
            chunk_size: The number of examples per chunk; by default, all examples. If 1, a loop
                without vmap is run: a Python loop in PyTorch, which supports any eager code, or
                `lax.map` in JAX.

        Returns:
            A function of f's arguments that returns the gradients, each leaf with a leading axis of
            examples.

        Raises:
            GradtoolsError: Batch sizes differ, no argument is split, or in_axes does not match the
                arguments; also as in `grad`.

        Example:
            >>> w, x = gt.asarray(np.float32(2.0)), gt.asarray(np.float32([1.0, 3.0]))
            >>> f = lambda w, x: w * x ** 2
            >>> gt.to_numpy(gt.per_example_grad(f)(w, x)).tolist()
            [1.0, 9.0]
            >>> of_x = gt.per_example_grad(f, argnums=1, in_axes=(None, 0))  # w is shared, x split
            >>> gt.to_numpy(of_x(w, x)).tolist()
            [4.0, 12.0]
        """
        chunk_size = whole_or_none("per_example_grad", "chunk_size", chunk_size, 1, "examples")
        refuse_axes(self._backend, "per_example_grad", in_axes)
        spec = GradientSpec("per_example_grad", f, argnums)
        call = partial(self._per_example, spec, in_axes, chunk_size)
        return derivative_function("per_example_grad", f, argnums, call)

    def _per_example(
        self, spec: GradientSpec, in_axes: Any, chunk_size: int | None, /, *args: Any, **kwargs: Any
    ) -> Any:
        name, of_example, whole = spec.operator, spec, args
        positions = normalized_argnums(name, spec.argnums, len(args))
        opened = self._backend.opened(name, spec.f, args, kwargs, positions)
        if opened is not None:
            args, of_example = opened.args, replace(spec, f=opened, opened=opened)
        arguments = arguments_of_call(name, of_example.f, args, kwargs, in_axes, positions)
        batch = Batch(self._backend, name, arguments)

        def of_one(*one: Any) -> Any:
            try:
                return self._scalar_gradient(of_example, *one)[2]
            except (TypeError, ValueError, IndexError) as error:
                note = self._backend.hint_at_traced_value(error)
                note = note or "f receives one example, without the batch axis; x[None] adds it."
                error.add_note(f"{name}: {note}")
                raise

        grads = batch.map(of_one, chunk_size)
        if opened is None:
            return grads
        opened.refuse_changes()
        again = partial(self._per_example, spec, in_axes, chunk_size, *whole, **kwargs)
        return self._backend.attaching(opened, name, again)(grads)

    # --- helpers that need the backend

    def _gradient_of(
        self, operator: str, f: Any, argnums: Argnums, has_aux: bool, disconnected: str, mode: str
    ) -> Callable[..., Any]:
        if disconnected != "raise":
            check_choice(operator, "disconnected_inputs", disconnected, get_args(Disconnected))
        spec = GradientSpec(operator, f, argnums, has_aux, disconnected)
        gradient = self._gradient_at
        if mode != "auto":  # the gradient is differentiated forward over reverse
            check_function(operator, f)
            check_choice(operator, "mode", mode, get_args(GradMode))
            frozen = Freezing(self._backend).frozen_for(f"{operator}(mode={mode!r})", f)
            spec, gradient = replace(spec, frozen=frozen), self._frozen_at
        return derivative_function(operator, f, argnums, partial(gradient, spec))

    def _frozen_at(self, spec: GradientSpec, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the gradient of `frozen(f)`, also with respect to modules in the arguments."""
        positions = normalized_argnums(spec.operator, spec.argnums, len(args))
        opened = self._backend.opened(spec.operator, spec.f, args, kwargs, positions)
        if opened is None or not opened.reads_own:
            return self._gradient_at(replace(spec, f=spec.frozen), *args, **kwargs)
        caller = f"{spec.operator}(mode='forward_over_reverse')"
        frozen = Freezing(self._backend).frozen_for(caller, opened)
        return self._gradient_at(replace(spec, f=frozen), *opened.args, **kwargs)

    def _gradient_at(self, spec: GradientSpec, /, *args: Any, **kwargs: Any) -> Any:
        value, aux, grads = self._scalar_gradient(spec, args, kwargs)
        if spec.operator == "grad":
            return (grads, aux) if spec.has_aux else grads
        if spec.minimizing is not None:
            signed = list(grads)
            for i in range(spec.minimizing, len(signed)):
                leaves, treedef = self._backend.flatten(signed[i])
                leaves = [None if x is None else -x for x in leaves]
                signed[i] = self._backend.unflatten(treedef, leaves)
            order = normalized_argnums(spec.operator, spec.argnums, len(args))
            pairs = sorted(zip(order, signed, strict=True), key=lambda pair: pair[0])
            grads = tuple(g for _, g in pairs)
        return ((value, aux) if spec.has_aux else value), grads

    def _scalar_gradient(
        self, spec: GradientSpec, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Evaluates the gradient of a scalar function; returns `(value, aux, grads)`."""
        operator, argnums, disconnected = spec.operator, spec.argnums, spec.disconnected_inputs
        name, fixed = "argnums", NOT_NAMED
        if operator == "minimax_value_and_grad":
            name = _PLAYERS
            fixed = "pass the value in an argument that is in neither minimize nor maximize"
        positions = normalized_argnums(operator, argnums, len(args), name)
        several = type(argnums) is not int and isinstance(argnums, (tuple, list))
        call = Call(self._backend, operator, spec.f, args, kwargs, positions, spec.has_aux, fixed)
        call.returns_output = operator != "grad"
        if spec.opened is not None:
            call.at_parameters_of(spec.opened)
        groups = None if disconnected == "zeros" else call.counts
        if disconnected == "strict":
            groups = [1] * len(call.leaves)
        evaluation = self._backend.vjp(call, call.leaves, groups=groups, once=True)
        value = call.scalar(evaluation.outs, evaluation.extras)
        grads: Sequence[Any] = evaluation.pullback([self._backend.ones_like(value)])
        if not evaluation.checked or any(map(is_missing, grads)):
            if disconnected != "zeros":
                check_connected(self._backend, call, evaluation, grads, disconnected)
            grads = self._backend.filled(grads, call.leaves)
        aux = None
        if spec.has_aux:
            aux = call.output(evaluation.outs, evaluation.extras)[1]
        elif call.opened is not None:
            call.settle(evaluation.extras)
        trees = call.to_trees(grads)
        results = value if call.returns_output else None, aux, trees if several else trees[0]
        if call.opened is None:
            return results
        return call.attaching(self._scalar_gradient, spec, args, kwargs)(results)


def derivative_function(
    operator: str, f: Any, argnums: Any, call: partial[Any]
) -> Callable[..., Any]:
    """Returns `call` with a name such as "grad(f)"; raises an error if f or argnums is invalid."""
    if not callable(f):
        check_function(operator, f)
    if type(argnums) is not int:
        refuse_arguments(operator, argnums)
    several = isinstance(argnums, (tuple, list))
    named = f"arguments {', '.join(map(str, argnums))}" if several else f"argument {argnums}"
    doc = f"{WHAT[operator]} with respect to {named}."
    return like_function(f"{operator}(", f, call, ")", doc)


WHAT = {
    "grad": "Gradient of {}",
    "value_and_grad": "Value and gradient of {}",
    "minimax_value_and_grad": "Value of {} and the gradient for each player",
    "per_example_grad": "Gradients of {} for each example",
    "jacobian": "Jacobian of {}",
    "hessian": "Hessian of {}",
    "retained_gradients": "Value and gradient of {}, and gradients for its marked values",
}
