"""The derivative operators, written once on a backend's vjp, jvp and linearize.

With J the Jacobian of f at x and Re<u, v> the inner product,

    pushforward  t -> J t          pullback  c -> J^H c          Re<c, J t> = Re<J^H c, t>

and every operator here is one of the two, or a composition of them. The gradient of a real f is
J^H 1, which for complex x is df/dRe + i df/dIm: `x - lr * grad` descends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, Literal, TypeVar, overload

from gradtools.arguments.batches import Batch, shared_examples_named
from gradtools.arguments.calls import NOT_NAMED, Call
from gradtools.arguments.checks import normalized_argnums, refuse_arguments, whole_or_none
from gradtools.arguments.in_axes import Argument, arguments_of_call
from gradtools.arguments.wording import describe, with_article
from gradtools.backend import Array, Backend, Fun, Operators, P, R, T
from gradtools.disconnected_inputs import Connection, is_missing, refuse_cut
from gradtools.errors import GradtoolsError
from gradtools.freezing import Freezing
from gradtools.function_names import like_function
from gradtools.gradient_types import Gradient, ValueAndGradient
from gradtools.jacobian_blocks import blocks, in_precision_of

A = TypeVar("A")
Argnums = int | Sequence[int]


@dataclass(frozen=True)
class GradientSpec:
    """The options of one gradient operator.

    Attributes:
        operator: The name of the public function, for messages.
        f: The function to differentiate.
        argnums: The arguments to differentiate with respect to.
        has_aux: Whether f returns a pair `(value, aux)`.
        disconnected_inputs: What happens if an argument does not reach the value; see `grad`.
    """

    operator: str
    f: Callable[..., Any]
    argnums: Argnums
    has_aux: bool = False
    disconnected_inputs: str = "raise"


Disconnected = Literal["raise", "warn", "zeros", "strict"]
JacobianMode = Literal["auto", "forward", "reverse"]
HvpMode = Literal["auto", "forward_over_reverse", "reverse_over_reverse"]
GradMode = Literal["auto", "forward_over_reverse"]
_DISCONNECTED = ("raise", "warn", "zeros", "strict")
_JACOBIAN_MODES = ("auto", "forward", "reverse")
_PLAYERS = "minimize or maximize"
_CLOSED_OVER = "let f close over it"  # where every argument is differentiated
_HVP_MODES = ("auto", "forward_over_reverse", "reverse_over_reverse")
_GRAD_MODES = ("auto", "forward_over_reverse")


class Derivatives(Operators):
    """The operators that differentiate."""

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
        """A function that computes the gradient of a real scalar f.

        f is evaluated once, and no `.grad` is changed. In JAX f is traced and the trace is run; if
        f branches on values, its Python code runs a second time without tracing.

        Args:
            f: Takes and returns pytrees of arrays; its output is one real array of shape ().
            argnums: Which positional arguments to differentiate with respect to: an integer or a
                tuple. An argument may be a whole module: a `torch.nn.Module` gives a dict of
                gradients by parameter name, an equinox or flax.nnx module what its library's own
                grad returns.
            has_aux: Whether f returns `(output, aux)`; aux may hold anything.
            disconnected_inputs: What happens when an argument does not reach the output:
                "raise", "warn", "zeros", or "strict", which raises for any single leaf.
            mode: How the gradient is differentiated in turn. "auto": by the framework's double
                backward, which keeps the graphs of f and of its gradient. "forward_over_reverse":
                by a jvp of the gradient, which is recomputed from the arguments, so that an
                unrolled optimization keeps the parameters of each step and no activations. f is
                wrapped in `frozen`: what it closes over is a constant.

        Returns:
            A function of f's arguments, returning a pytree like the argument (a tuple of them
            if argnums is a tuple), or `(grads, aux)`.

        Raises:
            GradtoolsError: (on call) The output is not a real scalar; a differentiated argument
                holds something that is not a floating or complex array; argnums is out of range.
                With mode="forward_over_reverse" also as `frozen`.
            DisconnectedInputError: (on call) As `disconnected_inputs` says.

        Example:
            >>> x = {"w": gt.asarray(np.float32([1.0, 2.0]))}
            >>> g = gt.grad(lambda x: (x["w"] ** 2).sum())(x)
            >>> gt.to_numpy(g["w"]).tolist()
            [2.0, 4.0]
        """
        if disconnected_inputs != "raise":
            _check_choice("grad", "disconnected_inputs", disconnected_inputs, _DISCONNECTED)
        if mode != "auto":
            f = self._forward_over_reverse("grad", f, mode)
        spec = GradientSpec("grad", f, argnums, has_aux, disconnected_inputs)
        return _named("grad", f, argnums, partial(self._gradient_at, spec))

    def _gradient_at(self, spec: GradientSpec, /, *args: Any, **kwargs: Any) -> Any:
        _, aux, grads = self._scalar_gradient(spec, args, kwargs)
        return (grads, aux) if spec.has_aux else grads

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
        """The value and the gradient of a real scalar f, from one evaluation.

        Args:
            f: As in `grad`.
            argnums: As in `grad`.
            has_aux: As in `grad`.
            disconnected_inputs: As in `grad`.
            mode: As in `grad`.

        Returns:
            A function of f's arguments, returning `(value, grads)` or `((value, aux), grads)`.

        Raises:
            GradtoolsError: As `grad` does.
            DisconnectedInputError: As `grad` does.

        Example:
            >>> value, g = gt.value_and_grad(lambda x: x ** 2)(gt.asarray(np.float32(3.0)))
            >>> float(value), float(g)
            (9.0, 6.0)
        """
        _check_choice("value_and_grad", "disconnected_inputs", disconnected_inputs, _DISCONNECTED)
        if mode != "auto":
            f = self._forward_over_reverse("value_and_grad", f, mode)
        spec = GradientSpec("value_and_grad", f, argnums, has_aux, disconnected_inputs)
        call = partial(self._value_and_gradient_at, spec)
        return _named("value_and_grad", f, argnums, call)

    def _value_and_gradient_at(self, spec: GradientSpec, /, *args: Any, **kwargs: Any) -> Any:
        value, aux, grads = self._scalar_gradient(spec, args, kwargs)
        return ((value, aux) if spec.has_aux else value), grads

    def minimax_value_and_grad(
        self,
        f: Callable[P, Any],
        minimize: Argnums,
        maximize: Argnums,
        has_aux: bool = False,
    ) -> Callable[P, tuple[Any, tuple[Any, ...]]]:
        """The value and the gradients of all players of a minimax problem.

        The gradients of the maximizing players are negated, so every player updates by `x - lr *
        grad` and ordinary optimizers work (GANs, domain-adversarial training).

        Args:
            f: As in `grad`.
            minimize: The argnums of the players that minimize f.
            maximize: The argnums of the players that maximize it.
            has_aux: Whether f returns `(value, aux)`.

        Returns:
            A function of f's arguments, returning `(value, grads)` or `((value, aux), grads)`,
            grads in ascending argnum order.

        Raises:
            GradtoolsError: As `grad` does, or if an argument both minimizes and maximizes.
            DisconnectedInputError: If a player does not reach f's output.

        Example:
            >>> f = lambda x, y: x ** 2 - y ** 2
            >>> two = gt.asarray(np.float32(2.0))
            >>> value, grads = gt.minimax_value_and_grad(f, 0, 1)(two, two)
            >>> [float(g) for g in grads]
            [4.0, 4.0]

        Source: the two aims of Goodfellow et al., Generative adversarial nets, 2014, and the one
        pass of Ganin and Lempitsky, Unsupervised domain adaptation by backpropagation, 2015.
        """
        down, up = (tuple(a) if isinstance(a, tuple | list) else (a,) for a in (minimize, maximize))
        spec = GradientSpec("minimax_value_and_grad", f, (*down, *up), has_aux)
        call = partial(self._value_and_signed_gradients, spec, len(down))
        return _named("minimax_value_and_grad", f, spec.argnums, call)

    def _value_and_signed_gradients(
        self, spec: GradientSpec, count: int, /, *args: Any, **kwargs: Any
    ) -> Any:
        value, aux, grads = self._scalar_gradient(spec, args, kwargs)
        signed = [g if i < count else self._negated(g) for i, g in enumerate(grads)]
        order = normalized_argnums("minimax_value_and_grad", spec.argnums, len(args))
        ordered = tuple(g for _, g in sorted(zip(order, signed, strict=True), key=_first))
        return ((value, aux) if spec.has_aux else value), ordered

    @overload
    def vjp(
        self, f: Callable[P, R], *primals: Any, has_aux: Literal[False] = False
    ) -> tuple[R, Callable[[Any], tuple[Any, ...]]]: ...
    @overload
    def vjp(
        self, f: Callable[P, tuple[R, A]], *primals: Any, has_aux: Literal[True]
    ) -> tuple[R, Callable[[Any], tuple[Any, ...]], A]: ...
    def vjp(self, f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
        """The value of f and its pullback c -> J^H c, from one evaluation.

        Args:
            f: Takes and returns pytrees of arrays.
            primals: Pytrees of floating or complex arrays.
            has_aux: Whether f returns `(output, aux)`.

        Returns:
            `(out, pullback)` or `(out, pullback, aux)`. The pullback takes a cotangent like out
            (entries at leaves that are not floating or complex are ignored), may be called many
            times, and returns a tuple with one pytree for each primal; a leaf that does not reach
            the output gives zeros. In JAX it is a pytree, like `jax.vjp`'s: it may pass through
            jit and scan, and may be a residual of a rule.

        Raises:
            GradtoolsError: A leaf is not differentiable, or a cotangent does not fit.

        Example:
            >>> out, pullback = gt.vjp(lambda x: x ** 2, gt.asarray(np.float32(3.0)))
            >>> (g,) = pullback(out)
            >>> float(out), float(g)
            (9.0, 54.0)

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 3.
        """
        _check_callable("vjp", f)
        call = Call(
            self._backend, "vjp", f, primals, {}, tuple(range(len(primals))), has_aux, _CLOSED_OVER
        )
        _check_primals(primals, "vjp")
        result = self._backend.vjp(call, call.leaves, groups=None, once=False)
        out, aux = call.output(result.outs, result.extras)

        (bare, likes), cut = self._backend.outliving(call, result.outs), result.cut

        attach = call.attaching(self.vjp, f, *primals, has_aux=has_aux)

        def pullback(pull: Any, cotangent: Any) -> tuple[Any, ...]:
            pulled = pull(bare.cotangents(cotangent, likes))
            refuse_cut(bare, cut(pulled))
            trees = bare.to_trees(self._filled(bare, pulled))
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
        """The value of f and its tangent J t, in forward mode, which keeps no graph.

        What f computes under `torch.no_grad` is a constant, as in reverse mode. (PyTorch's own
        forward mode, which `torch.compile` runs, ignores `no_grad`: pytorch#128600.) For operations
        whose forward mode is wrong or missing in PyTorch, and for custom operators, the backward
        pass is transposed.

        Args:
            f: Takes and returns pytrees of arrays.
            primals: One pytree of floating or complex arrays for each argument.
            tangents: The same structure, shapes and dtypes.
            has_aux: Whether f returns `(output, aux)`.

        Returns:
            `(out, tangent_out)` or `(out, tangent_out, aux)`; tangent_out is None at leaves
            that are not floating or complex.

        Raises:
            GradtoolsError: A tangent does not fit its primal; f holds something that forward
                mode cannot enter (a reverse-only edit, a kernel without forward mode, in PyTorch
                a hook on a gradient).

        Example:
            >>> x, t = gt.asarray(np.float32(3.0)), gt.asarray(np.float32(1.0))
            >>> out, dout = gt.jvp(lambda x: x ** 2, (x,), (t,))
            >>> float(out), float(dout)
            (9.0, 6.0)

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 3.
        """
        _check_callable("jvp", f)
        primals, tangents = _same_length("jvp", primals, tangents)
        call = Call(
            self._backend, "jvp", f, primals, {}, tuple(range(len(primals))), has_aux, _CLOSED_OVER
        )
        flat_tangents = call.from_trees(tangents, "tangent")
        outs, extras, pushed = self._backend.jvp(call, call.leaves, flat_tangents)
        out, aux = call.output(outs, extras)
        tangent_out = call.tangent_output(pushed)
        result = (out, tangent_out, aux) if has_aux else (out, tangent_out)
        return call.attaching(self.jvp, f, primals, tangents, has_aux)(result)

    def linearize(self, f: Callable[P, R], *primals: Any) -> tuple[R, Callable[..., R]]:
        """The value of f and its pushforward t -> J t, from one evaluation.

        Args:
            f: Takes and returns pytrees of arrays.
            primals: Pytrees of floating or complex arrays.

        Returns:
            `(out, pushforward)`. The pushforward takes one tangent for each primal and may be
            called many times. It keeps what `vjp` keeps; where one direction is enough, `jvp`
            keeps nothing.

        Raises:
            GradtoolsError: A leaf is not differentiable, or a tangent does not fit.

        Example:
            >>> out, pushforward = gt.linearize(lambda x: x ** 2, gt.asarray(np.float32(3.0)))
            >>> float(pushforward(gt.asarray(np.float32(1.0))))
            6.0

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 3.
        """
        _check_callable("linearize", f)
        _check_primals(primals, "linearize")
        call = Call(
            self._backend,
            "linearize",
            f,
            primals,
            {},
            tuple(range(len(primals))),
            False,
            _CLOSED_OVER,
        )
        outs, extras, push = self._backend.linearize(call, call.leaves)

        (bare, _), expected = self._backend.outliving(call, outs), call.argnums
        attach = call.attaching(self.linearize, f, *primals)

        def pushforward(push: Any, *tangents: Any) -> Any:
            _same_length("linearize", expected, tangents)
            pushed = bare.tangent_output(push(bare.from_trees(tangents, "tangent")))
            return attach(pushed, lambda result: result[1](*tangents))

        out = attach(call.output(outs, extras)[0], _first)
        return out, self._backend.linear_map(pushforward, push)

    def jacobian(
        self,
        f: Callable[P, Any],
        argnums: Argnums = 0,
        mode: JacobianMode = "auto",
        chunk_size: int | None = None,
        sparsity: Any = None,
    ) -> Callable[P, Any]:
        """The Jacobian of f: every output entry by every input entry.

        Args:
            f: Takes and returns pytrees of arrays; real inputs.
            argnums: Which positional arguments to differentiate with respect to.
            mode: "reverse" pulls back one unit cotangent for each output entry, "forward" pushes
                one unit tangent for each input entry. "auto" takes the smaller number. In PyTorch
                the size of the output is known once f is evaluated: if it is more than twice
                that of the input, tangents are pushed by the transposed pullback, as `linearize`
                does, provided that f consists of PyTorch's own operations and sets no gradient
                hooks. If f's output has another precision than its input, "forward" gives that of
                the output, the others that of the input.
            chunk_size: How many unit vectors at once; all by default. 1 is a loop without vmap: in
                PyTorch a Python loop, which takes any eager code, in JAX `lax.map`.
            sparsity: Of an f from one array to one array: where its Jacobian may differ from zero,
                a sparse matrix of SciPy, PyTorch or JAX (BCOO) or a boolean array, with one row
                for each entry of the output and one column for each of the input, or of the
                Jacobian's shape. Or "detect": the pattern is read from the program of f, which is
                traced (PyTorch: run) once more for it, and is never smaller than the true one.
                Columns, rows or both are coloured, so that a banded Jacobian takes as many
                products as it has bands. It needs `pip install "gradtools[sparse]"`.

        Returns:
            A function of f's arguments. For an output leaf of shape s and an input leaf of shape
            t it returns an array of shape s + t, in the tree of the output, with the tree of the
            argument (a tuple of trees if argnums is a tuple) at each leaf. With sparsity, one
            sparse array of shape s + t: `torch.sparse_coo`, or `jax.experimental.sparse.BCOO`.

        Raises:
            GradtoolsError: An input is complex (its Jacobian is not a complex matrix: use pairs of
                real arrays, or `hvp`, `jvp` and `vjp`, which are real-linear); the mode is
                unknown; the chunk size is below 1; the pattern omits a nonzero entry, as a product
                with a random vector shows (under `jax.jit` the entries then are NaN).

        Example:
            >>> x = gt.asarray(np.float32([1.0, 2.0]))
            >>> gt.to_numpy(gt.jacobian(lambda x: x ** 2)(x)).tolist()
            [[2.0, 0.0], [0.0, 4.0]]
        """
        _check_choice("jacobian", "mode", mode, _JACOBIAN_MODES)
        chunk_size = whole_or_none("jacobian", "chunk_size", chunk_size, 1, "unit vectors")

        call = partial(self._jacobian_at, f, argnums, mode, chunk_size, sparsity)
        return _named("jacobian", f, argnums, call)

    def _jacobian_at(
        self,
        f: Any,
        argnums: Argnums,
        mode: str,
        chunk_size: int | None,
        sparsity: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if sparsity is None:
            return self._jacobian("jacobian", f, argnums, mode, chunk_size, args, kwargs)
        from gradtools.sparse.jacobians import sparse_jacobian

        call = Call(
            self._backend,
            "jacobian",
            f,
            args,
            kwargs,
            normalized_argnums("jacobian", argnums, len(args)),
        )
        run = self._backend.stage(call, call.leaves).run
        uncompiled = self._backend.compiler.uncompiled
        return uncompiled(sparse_jacobian, call, run, sparsity, mode, chunk_size)

    def hvp(
        self,
        f: Callable[P, Any],
        primals: Sequence[Any],
        tangents: Sequence[Any],
        mode: HvpMode = "auto",
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The gradient of a real scalar f and its Hessian times a vector, from one evaluation.

        Products with several vectors at one point share an evaluation by `linearize(grad(f), x)`.

        For complex arguments the Hessian is that of the real and imaginary parts: real-linear
        in the tangent, symmetric under Re<u, v>.

        Args:
            f: As in `grad`.
            primals: One pytree of floating or complex arrays for each argument.
            tangents: The same structure, shapes and dtypes.
            mode: "forward_over_reverse" (a jvp of the gradient), "reverse_over_reverse" (a vjp
                of it), or "auto": the latter in PyTorch, the former in JAX unless f holds a
                reverse-only edit. In JAX an f with a `while_loop`, which has no reverse mode, is
                differentiated forward over forward.

        Returns:
            `(gradient, product)`, each a tuple with one pytree for each primal.

        Raises:
            GradtoolsError: As `grad` and `jvp` do.

        Example:
            >>> x, t = gt.asarray(np.float32(3.0)), gt.asarray(np.float32(1.0))
            >>> (g,), (h,) = gt.hvp(lambda x: x ** 3, (x,), (t,))
            >>> float(g), float(h)
            (27.0, 18.0)

        Source: Pearlmutter, Fast exact multiplication by the Hessian, 1994.
        """
        _check_callable("hvp", f)
        _check_choice("hvp", "mode", mode, _HVP_MODES)
        primals, tangents = _same_length("hvp", primals, tangents)
        argnums = tuple(range(len(primals)))
        call = Call(self._backend, "hvp", f, primals, {}, argnums, False, _CLOSED_OVER)
        flat_tangents = call.from_trees(tangents, "tangent")
        mode, fun = self._second_order(call, mode)
        gradient = self._flat_gradient(call, fun, mode)
        if mode.startswith("forward"):
            grads, extras, products = self._backend.jvp(gradient, call.leaves, flat_tangents)
        else:
            evaluation = self._backend.vjp(gradient, call.leaves, groups=None, once=True)
            grads, extras = evaluation.outs, evaluation.extras
            products = self._filled(call, evaluation.pullback(flat_tangents))
        call.settle(extras)
        pair = call.to_trees(grads), call.to_trees(products)
        return call.attaching(self.hvp, f, primals, tangents, mode)(pair)

    def hessian(
        self, f: Callable[P, Any], argnums: Argnums = 0, sparsity: Any = None
    ) -> Callable[P, Any]:
        """The Hessian of a real scalar f of real arguments.

        Args:
            f: As in `grad`.
            argnums: Which positional arguments to differentiate with respect to.
            sparsity: As in `jacobian`, of the Hessian; an entry on one side of the diagonal need
                not be repeated on the other.

        Returns:
            A function of f's arguments. For argument leaves of shapes s and t it returns an
            array of shape s + t, in the tree of the argument, with that tree again at each leaf;
            for a tuple of argnums, a tuple of tuples. With sparsity, one sparse array.

        Raises:
            GradtoolsError: An input is complex, or as `grad` does.

        Example:
            >>> x = gt.asarray(np.float32([1.0, 2.0]))
            >>> gt.to_numpy(gt.hessian(lambda x: (x ** 3).sum())(x)).tolist()
            [[6.0, 0.0], [0.0, 12.0]]
        """
        return _named("hessian", f, argnums, partial(self._hessian_at, f, argnums, sparsity))

    def _hessian_at(
        self, f: Any, argnums: Argnums, sparsity: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        positions = normalized_argnums("hessian", argnums, len(args))
        call = Call(self._backend, "hessian", f, args, kwargs, positions)
        _refuse_complex(self._backend, call)
        mode, fun = self._second_order(call, "auto")
        gradient = self._flat_gradient(call, fun, mode)
        if sparsity is not None:
            from gradtools.sparse.jacobians import sparse_hessian

            uncompiled = self._backend.compiler.uncompiled
            return uncompiled(sparse_hessian, call, gradient, sparsity, mode.split("_")[0])
        row_blocks = blocks(self._backend, gradient, call.leaves, mode.split("_")[0], None)
        call.refuse_changes()
        rows = [call.to_trees(row) for row in row_blocks]
        if isinstance(argnums, tuple | list):
            hessian = call.to_trees(rows)
        else:
            hessian = call.to_trees([row[0] for row in rows])[0]
        return call.attaching(self._hessian_at, f, argnums, None, *args, **kwargs)(hessian)

    def per_example_grad(
        self,
        f: Callable[P, Any],
        argnums: Argnums = 0,
        in_axes: Any = None,
        chunk_size: int | None = None,
    ) -> Callable[P, Any]:
        """One gradient for each example of a batch.

        Args:
            f: A real scalar function of one example, as in `grad`.
            argnums: Which positional arguments to differentiate with respect to.
            in_axes: Which axes are split, as in `vmap`. None altogether: the arguments in argnums
                are shared, unless there is no other batch, and every array of the others is split
                on axis 0. Else an integer, one entry for each positional argument, or a dict from
                f's parameters to axes, where None shares one. What no entry names is split on
                axis 0, keyword arguments too; arrays without axes and what is no array are shared.
            chunk_size: How many examples at once; all by default. 1 is a loop without vmap: in
                PyTorch a Python loop, which takes any eager code, in JAX `lax.map`.

        Returns:
            A function of f's arguments; what `grad` would return, each leaf with the examples
            in front.

        Raises:
            GradtoolsError: Batch sizes differ, there is none, in_axes does not fit, or as `grad`.

        Example:
            >>> w, x = gt.asarray(np.float32(2.0)), gt.asarray(np.float32([1.0, 3.0]))
            >>> g = gt.per_example_grad(lambda w, x: w * x ** 2)(w, x)
            >>> gt.to_numpy(g).tolist()
            [1.0, 9.0]
        """
        chunk_size = whole_or_none("per_example_grad", "chunk_size", chunk_size, 1, "examples")
        spec = GradientSpec("per_example_grad", f, argnums)
        call = partial(self._per_example, spec, in_axes, chunk_size)
        return _named("per_example_grad", f, argnums, call)

    def _per_example(
        self, spec: GradientSpec, in_axes: Any, chunk_size: int | None, /, *args: Any, **kwargs: Any
    ) -> Any:
        name, of_example, whole = spec.operator, spec, args
        positions = normalized_argnums(name, spec.argnums, len(args))
        opened = self._backend.opened(name, spec.f, args, kwargs, positions)
        if opened is not None:
            args, of_example = opened.args, replace(spec, f=opened)
        arguments = arguments_of_call(name, of_example.f, args, kwargs, in_axes, positions)
        if in_axes is None and len(positions) == 1:
            only = Argument(positions[0], args[positions[0]], 0)
            if self._is_split([only]) and not self._is_split(arguments):
                arguments[positions[0]] = only
        batch = Batch(self._backend, name, arguments)
        with shared_examples_named(name, arguments):
            grads = batch.map(lambda *one: self._scalar_gradient(of_example, *one)[2], chunk_size)
        if opened is None:
            return grads
        opened.refuse_changes()
        again = partial(self._per_example, spec, in_axes, chunk_size, *whole, **kwargs)
        return self._backend.attaching(opened, name, again)(grads)

    def _is_split(self, arguments: list[Argument]) -> bool:
        """Whether any argument that `in_axes` splits holds an array with axes."""
        split = [a.value for a in arguments if a.axes is not None]
        leaves = [x for value in split for x in self._backend.flatten(value)[0]]
        return any(getattr(x, "shape", ()) != () for x in leaves)

    def mixed_partial(
        self, f: Callable[[Any, R], Any], G: Callable[[T], R], y: Any, z: T, u: Any
    ) -> Any:
        """(d/dy) <u, (d/dz) f(y, G(z))>, with one forward-mode pass through G and no graph of it.

        With J the Jacobian of G at z and w = J u, <u, (d/dz) f(y, G(z))> = <w, (d/dg) f(y, g)>
        at g = G(z): so G is passed once in forward mode, and only f is differentiated twice.
        What is kept does not grow with the depth of G. The result is differentiable, also with
        respect to z, u and what G captures: in PyTorch that evaluates G once more.

        Several directions share one evaluation of f, and in JAX one of G. In PyTorch G runs once
        for each direction, each time from the same random state, buffers and attributes.

        Args:
            f: A real scalar function of y and of what G returns.
            G: Any function of z that has a forward mode. PyTorch: fused attention and recurrent
                layers on the CPU, which have none, are replaced by PyTorch's own alternatives,
                which is reported once.
            y: A pytree of floating or complex arrays.
            z: The same, for G.
            u: The direction, a pytree like z, or a list of such pytrees.

        Returns:
            A pytree like y, or a list of them.

        Raises:
            GradtoolsError: u does not fit z; G has no forward mode; in PyTorch, when the result
                is differentiated and G, evaluated once more, returns another value.

        Example:
            >>> y, z, u = (gt.asarray(np.float32(v)) for v in (2.0, 3.0, 1.0))
            >>> float(gt.mixed_partial(lambda y, g: (y * g) ** 2, lambda z: z * z, y, z, u))
            432.0

        Source: forward over reverse, as in Pearlmutter, Fast exact multiplication by the Hessian,
        1994, with the pushforward taken through G alone.
        """
        _check_callable("mixed_partial", f)
        _check_callable("mixed_partial", G, "G")
        single = (
            not isinstance(u, list) or self._backend.flatten(u)[1] == (self._backend.flatten(z)[1])
        )
        if single:
            return self._mixed_partials(f, G, y, z, [u])[0]
        # Uncompiled: each direction runs G from the same random state, which dynamo cannot restore.
        return self._backend.compiler.uncompiled(self._mixed_partials, f, G, y, z, u)

    # --- helpers that need the backend

    def _forward_over_reverse(self, operator: str, f: Any, mode: str) -> Any:
        """f, whose gradient is differentiated forward over reverse, by a jvp of the gradient."""
        _check_callable(operator, f)
        _check_choice(operator, "mode", mode, _GRAD_MODES)
        return Freezing(self._backend).frozen_for(f"{operator}(mode={mode!r})", f)

    def _scalar_gradient(
        self, spec: GradientSpec, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """`(value, aux, grads)`."""
        operator, argnums, disconnected = spec.operator, spec.argnums, spec.disconnected_inputs
        name, fixed = "argnums", NOT_NAMED
        if operator == "minimax_value_and_grad":
            name = _PLAYERS
            fixed = "keep it in an argument that neither minimize nor maximize names"
        positions = normalized_argnums(operator, argnums, len(args), name)
        several = type(argnums) is not int and isinstance(argnums, tuple | list)
        call = Call(self._backend, operator, spec.f, args, kwargs, positions, spec.has_aux, fixed)
        call.returns_output = operator != "grad"
        groups = None if disconnected == "zeros" else call.counts
        if disconnected == "strict":
            groups = [1] * len(call.leaves)
        evaluation = self._backend.vjp(call, call.leaves, groups=groups, once=True)
        value = call.scalar(evaluation.outs, evaluation.extras)
        grads: Sequence[Any] = evaluation.pullback([self._backend.ones_like(value)])
        if not evaluation.checked or any(map(is_missing, grads)):
            if disconnected != "zeros":
                Connection(self._backend, call, evaluation, grads).check(disconnected)
            grads = self._filled(call, grads)
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

    def _filled(self, call: Call, grads: Sequence[Array | None]) -> list[Array]:
        zeros = self._backend.zeros_like
        return [zeros(x) if g is None else g for x, g in zip(call.leaves, grads, strict=True)]

    def _flat_gradient(self, call: Call, fun: Fun, mode: str) -> Fun:
        """The gradient of a call as a function of flat arrays; `fun` evaluates the call."""

        def pushed(*leaves: Array) -> tuple[list[Array], list[Array]]:
            rows = blocks(self._backend, fun, list(leaves), "forward", None)
            if len(rows) != 1 or [g.shape for g in rows[0]] != [x.shape for x in leaves]:
                call.scalar(*fun(*leaves))  # which raises
            return rows[0], []

        def gradient(*leaves: Array) -> tuple[list[Array], list[Array]]:
            evaluation = self._backend.vjp(fun, list(leaves), groups=None, once=True)
            out = call.scalar(evaluation.outs, evaluation.extras)
            grads = evaluation.pullback([self._backend.ones_like(out)])
            refuse_cut(call, evaluation.cut(grads))
            return self._filled(call, grads), evaluation.extras if call.opened is not None else []

        chosen = pushed if mode == "forward_over_forward" else gradient
        chosen.caller = call.caller  # type: ignore[attr-defined]
        return chosen

    def _second_order(self, call: Call, mode: str) -> tuple[str, Fun]:
        """The mode that "auto" means for this call, and the function that evaluates the call."""
        if mode != "auto" or self._backend.hvp_mode == "reverse_over_reverse":
            return (self._backend.hvp_mode if mode == "auto" else mode), call
        staged = self._backend.stage(call, call.leaves)
        refuse_cut(call, staged.cut())
        mode = "reverse_over_reverse" if staged.reverse_only else "forward_over_reverse"
        if staged.forward_only and not any(map(self._backend.is_complex, call.leaves)):
            mode = "forward_over_forward"
        return mode, staged.run

    def _negated(self, tree: Any) -> Any:
        leaves, treedef = self._backend.flatten(tree)
        return self._backend.unflatten(treedef, [None if x is None else -x for x in leaves])

    def _mixed_partials(self, f: Any, G: Any, y: Any, z: Any, us: list[Any]) -> list[Any]:
        """The mixed partial derivatives along each direction of `us`."""
        if not us:
            return []
        backend = self._backend
        g, ws = self._pushed_through(G, z, us)
        call = Call(backend, "mixed_partial", f, (y, g), {}, (0, 1), False, _CLOSED_OVER)
        count = call.counts[0]
        many = [[x for x in backend.flatten(w)[0] if x is not None] for w in ws]
        mode, fun = self._second_order(call, "auto")
        if mode == "forward_over_reverse":
            by_y = _partial_of(self, call, fun, 0)
            rows = backend.jvps(by_y, call.leaves[count:], many)[2]
        else:
            by_g = _partial_of(self, call, fun, 1)
            evaluation = backend.vjp(by_g, call.leaves[:count], groups=None, once=len(many) == 1)
            rows = [backend.filled(evaluation.pullback(w), call.leaves[:count]) for w in many]
        call.refuse_changes()
        return [call.to_trees([*row, *call.leaves[count:]])[0] for row in rows]

    def _pushed_through(self, G: Any, z: Any, us: list[Any]) -> tuple[Any, list[Any]]:
        """G(z) and its tangent along each of us, in forward mode."""
        backend = self._backend
        call = Call(backend, "mixed_partial", G, (z,), {}, (0,), False, _CLOSED_OVER)
        many = [call.from_trees((u,), "tangent") for u in us]
        outs, extras, pushed = backend.jvps(call, call.leaves, many)
        if not outs:
            came = call.output(outs, extras)[0]
            hint = " Is a return statement missing?" if came is None else ""
            raise GradtoolsError(
                "mixed_partial: G must return a floating or complex array; got "
                f"{describe(backend, came)}.{hint}"
            )
        return call.output(outs, extras)[0], [call.tangent_output(dys) for dys in pushed]

    # --- jacobian

    def _jacobian(
        self,
        caller: str,
        f: Any,
        argnums: Argnums,
        mode: str,
        chunk_size: int | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        _check_callable(caller, f)
        positions = normalized_argnums(caller, argnums, len(args))
        call = Call(self._backend, caller, f, args, kwargs, positions)
        _refuse_complex(self._backend, call)
        fun: Fun = call
        if is_auto := mode == "auto":
            call.may_transpose = True
            staged = self._backend.stage(call, call.leaves)
            refuse_cut(call, staged.cut())
            mode, fun = staged.jacobian_mode, staged.run
        row_blocks = blocks(self._backend, fun, call.leaves, mode, chunk_size)
        if is_auto:  # the dtype must not depend on which mode the output's size selects
            row_blocks = [
                [
                    in_precision_of(self._backend, x, b)
                    for x, b in zip(call.leaves, row, strict=True)
                ]
                for row in row_blocks
            ]
        call.refuse_changes()
        rows = [call.to_trees(row) for row in row_blocks]
        if not isinstance(argnums, tuple | list):
            rows = [row[0] for row in rows]
        attach = call.attaching(self._jacobian, caller, f, argnums, mode, chunk_size, args, kwargs)
        return attach(call.tangent_output(rows))


def _partial_of(operators: Derivatives, call: Call, fun: Fun, which: int) -> Fun:
    """For f(y, g): its gradient in argument `which`, as a function of the other's leaves."""
    backend, count = operators._backend, call.counts[0]
    leaves = call.leaves[:count] if which == 0 else call.leaves[count:]

    def gradient(*others: Array) -> tuple[list[Array], list[Array]]:
        def restricted(*xs: Array) -> tuple[list[Array], list[Array]]:
            return fun(*xs, *others) if which == 0 else fun(*others, *xs)

        evaluation = backend.vjp(restricted, leaves, groups=None, once=True)
        out = call.scalar(evaluation.outs, evaluation.extras)
        pulled = evaluation.pullback([backend.ones_like(out)])
        refuse_cut(call, [i + (count if which else 0) for i in evaluation.cut(pulled)])
        return backend.filled(pulled, leaves), []

    return gradient


def _refuse_complex(backend: Backend, call: Call) -> None:
    for x, path in zip(call.leaves, call.paths, strict=True):
        if backend.is_complex(x):
            raise GradtoolsError(
                f"{call.caller}: {path} is complex ({backend.dtype_name(x)}). The Jacobian of a "
                "function that is not holomorphic is not a complex matrix. Pass the real and "
                "imaginary parts as two real arrays, or use hvp, jvp or vjp, which are real-linear."
            )


def _named(operator: str, f: Any, argnums: Any, call: partial[Any]) -> Callable[..., Any]:
    if not callable(f):
        _check_callable(operator, f)
    if type(argnums) is not int:
        refuse_arguments(operator, argnums)
    return like_function(f"{operator}(", f, call, ")")


def _check_callable(caller: str, f: Any, name: str = "f") -> None:
    if not callable(f):
        came = (
            repr(f)
            if isinstance(f, str | int | float | complex | None)
            else with_article(type(f).__name__)
        )
        hint = f" Pass the function, not its result: {caller}(f)(x)." if hasattr(f, "dtype") else ""
        raise GradtoolsError(f"{caller}: {name} must be a function, got {came}.{hint}")


def _check_choice(caller: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise GradtoolsError(f"{caller}: {name} is {value!r}; expected one of {allowed}.")


def _check_primals(primals: Sequence[Any], caller: str) -> None:
    if not primals:
        raise GradtoolsError(f"{caller}: no primals were given; pass f's arguments after f.")


def _same_length(
    caller: str, primals: Any, tangents: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise GradtoolsError(
                f"{caller}: {name} must be a tuple with one entry for each argument of f, got "
                f"{with_article(type(given).__name__)}. For one argument write (x,)."
            )
    if len(primals) != len(tangents) or not primals:
        raise GradtoolsError(
            f"{caller}: got {len(primals)} primals and {len(tangents)} tangents; expected one "
            "tangent for each primal, and at least one."
        )
    return tuple(primals), tuple(tangents)


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]
