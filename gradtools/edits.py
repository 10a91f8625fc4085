"""Defines gradient edits: functions that return their input and have a custom derivative.

Each edit is a rule whose primal is the identity, y = x. The edits differ in their cotangent maps:

    reverse, scale    x' = s y'          linear: both modes, every order
    straight_through  x' = J_g^H y'      linear, with a surrogate g
    clip              x' = c(y')         not linear: reverse mode only
    transform         x' = fn(y')        not linear: reverse mode only
    replace           x' = dx            not linear: reverse mode only

A second derivative passes through the edit again: with scale s the Hessian of f(scale(x)) is s^2
f''.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.arguments.checks import as_array, as_float, check_function, matching
from gradtools.arguments.wording import NO_RETURN, describe, in_words, name_of, shown
from gradtools.backend import Array, Backend, Operators, P, R, T
from gradtools.boundary import user_facing
from gradtools.clipping import ARRAY, bound_of, clip_rule, has_real_dtype
from gradtools.errors import GradtoolsError, noted
from gradtools.integrations.containers import is_same
from gradtools.rules import Rule, replaced_at

if TYPE_CHECKING:
    from gradtools.gradient_types import RealLike

# --- the rules ---------------------------------------------------------------------------

SCALE = Rule(
    "scale_gradient",
    primal=lambda x, s: [x],
    tangent=lambda s, dxs: [None if dxs[0] is None else s[0] * dxs[0]],
    cotangent=lambda s, cts: [s[0] * cts[0], None],
    nondifferentiable=(1,),
    saves=(1,),
    reaches="identity",
)
"""A rule with inputs x and s: y = x, dy = s dx."""

STRAIGHT_THROUGH = Rule(
    "straight_through",
    primal=lambda y, s: [y],
    tangent=lambda _, dxs: [dxs[1]],
    cotangent=lambda _, cts: [None, cts[0]],
    nondifferentiable=(0,),
    saves=(),
    reaches="identity",
)
"""A rule with inputs y and s, which returns y with the derivative of s."""

THROUGH = Rule(
    "straight_through",
    primal=lambda s: [s],
    tangent=lambda _, dxs: [dxs[0]],
    cotangent=lambda _, cts: [cts[0]],
    saves=(),
    reaches="identity",
)
"""`STRAIGHT_THROUGH` with s as its only input; each call passes the value to `Backend.edited`."""

TRANSFORM = Rule(
    "transform_gradient",
    primal=lambda x: [x],
    cotangent=lambda _, cts: list(cts),
    saves=(),
    reaches="identity",
    reverse_only=True,
)
"""A rule with input x; each call passes a cotangent map to `Backend.edited`."""

REPLACE_COTANGENT = Rule(
    "replace_gradient",
    primal=lambda x, dx: [x],
    cotangent=lambda dx, cts: [dx[0], None],
    nondifferentiable=(1,),
    saves=(1,),
    reaches="identity",
    reverse_only=True,
)
"""A rule with inputs x and dx; the cotangent of x is dx for every incoming cotangent."""


# --- the public edits --------------------------------------------------------------------


class Edits(Operators):
    """The operators that edit a gradient."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._clip_rule = lru_cache(partial(clip_rule, backend))
        # Dynamo embeds the returned key as a constant, so these rules are never freed.
        keyed = cache(partial(clip_rule, backend))
        key = lambda count, *kinds: keyed(count, *kinds).key
        self._clip_key = backend.compiler.constant_result(key)

    def reverse_gradient(self, x: T, scale: RealLike = 1.0) -> T:
        """Reverses the gradient that flows through x: y = x, dy = -scale dx.

        The edit is linear, so it supports derivatives of every order in every combination of
        forward and reverse mode. At second order the factor is squared: the Hessian of
        f(reverse_gradient(x)) is scale^2 f''.

        Args:
            x: A pytree of arrays. Leaves that are not floating or complex are unchanged.
            scale: A nonnegative real number, or a real array that broadcasts to every leaf's shape.
                The scale may be traced, may change between calls, and is not differentiated.

        Returns:
            A copy of x with the same values, to be used in place of x; only this result has the
            edited gradient.

        Raises:
            GradtoolsError: scale is complex or a negative number, or does not broadcast; x is an
                object without arrays, such as a function.

        Example:
            >>> x = gt.asarray(np.float32(3.0))
            >>> float(gt.grad(lambda x: gt.reverse_gradient(x, 0.5) ** 2)(x))
            -3.0

        Source: Ganin and Lempitsky, Unsupervised domain adaptation by backpropagation, 2015.
        """
        return self._scaled("reverse_gradient", x, scale, -1)

    def scale_gradient(self, x: T, scale: RealLike) -> T:
        """Scales the gradient that flows through x: y = x, dy = scale dx.

        Args:
            x: A pytree of arrays. Leaves that are not floating or complex are unchanged.
            scale: A real number, or a real array that broadcasts to every leaf's shape. The scale
                may be traced, may change between calls, and is not differentiated.

        Returns:
            x, unchanged, to be used in place of x; only this result has the edited gradient.

        Raises:
            GradtoolsError: scale is complex or does not broadcast; x is an object without arrays,
                such as a function.

        Example:
            >>> x = gt.asarray(np.float32(3.0))
            >>> float(gt.grad(lambda x: gt.scale_gradient(x, 0.5) ** 2)(x))
            3.0
        """
        return self._scaled("scale_gradient", x, scale, 1)

    def _scaled(self, name: str, x: Any, scale: Any, sign: int) -> Any:
        backend = self._backend
        if isinstance(x, (float, int)):
            _check_x_first(name, x, "scale", scale)
        if sign < 0 and isinstance(scale, (float, int, np.number)) and scale < 0:
            check_reversal(name, scale)
        if isinstance(scale, int):
            scale = as_float(name, "scale", scale)
        rule = None
        if type(scale) is float and not (backend.compiles_rules or backend.compiler.is_tracing()):
            rule = _scaling((sign * scale).hex())
            if (edited := backend.edited(rule, x)) is not None:
                return edited

        def one(leaf: Array, i: int) -> Array:
            if rule is not None:
                return backend.apply_rule(rule, leaf)[0]
            if isinstance(scale, float):  # a float is negated in Python, not on the device
                factor = backend.real_scalar(sign * scale if sign < 0 else scale, leaf)
                return backend.apply_rule(SCALE, leaf, factor)[0]
            backend.check_array(scale, "scale")
            if not has_real_dtype(scale):
                raise GradtoolsError(
                    f"{name}: scale is {describe(backend, scale)}; it must be a real number, or an "
                    "array of real numbers that broadcasts to every leaf. For a complex factor use "
                    "transform_gradient."
                )
            factor = backend.real_scalar(scale, leaf)
            shape, wanted = tuple(factor.shape), tuple(leaf.shape)
            pairs = zip(reversed(shape), reversed(wanted), strict=False)
            if len(shape) > len(wanted) or not all(a in (1, b) for a, b in pairs):
                raise GradtoolsError(
                    f"{name}: scale has shape {shape}, which does not broadcast to leaf "
                    f"x{backend.leaf_paths(x)[i]} of shape {wanted}. Give a scalar, or an array "
                    "that broadcasts to every leaf."
                )
            return backend.apply_rule(SCALE, leaf, factor if sign > 0 else -factor)[0]

        return _edit(backend, name, lambda leaves, places: [*map(one, leaves, places)], x)

    def stop_gradient(self, x: T) -> T:
        """Stops the gradient at x: y = x, dy = 0, in forward and reverse mode.

        Args:
            x: A pytree of arrays.

        Returns:
            x, unchanged, without a gradient.

        Raises:
            GradtoolsError: x is an object without arrays, such as a function.

        Example:
            >>> x = gt.asarray(np.float32(3.0))
            >>> float(gt.grad(lambda x: x * gt.stop_gradient(x))(x))
            3.0
        """
        return _stopped(self._backend, "stop_gradient", x)

    def clip_gradient(
        self, x: T, max_norm: RealLike | None = None, max_value: RealLike | None = None
    ) -> T:
        """Clips the gradient that flows through x, by entrywise modulus and by global norm.

        Each entry c becomes c min(1, max_value / |c|). The gradients of all leaves are then
        multiplied by min(1, max_norm / norm), where norm is the 2-norm over all of them. There is
        no epsilon; a zero cotangent stays zero, and NaN stays NaN. The edit supports reverse mode
        only; at second order the cotangent is clipped again.

        Args:
            x: A pytree of arrays in f's forward pass, not gradients: for computed gradients, use
                `torch.nn.utils.clip_grad_norm_` or `optax.clip_by_global_norm`.
            max_norm: The largest 2-norm, a nonnegative real scalar, which may be traced or
                scheduled. If None, the norm is not clipped.
            max_value: The largest modulus of an entry, a nonnegative real scalar. If None, the
                entries are not clipped. A negative bound raises an error; if the bound is traced or
                on an accelerator, the gradient is NaN instead.

        Returns:
            x, unchanged, to be used in place of x; only this result has the edited gradient.

        Raises:
            GradtoolsError: Neither bound is given, or a bound is negative or not a real scalar; or
                the edit is used in `gt.jvp`.

        Example:
            >>> x = gt.asarray(np.float32([3.0, 4.0]))
            >>> g = gt.grad(lambda x: (gt.clip_gradient(x, max_norm=1.0) ** 2).sum())(x)
            >>> gt.to_numpy(g).round(4).tolist()
            [0.6000000238418579, 0.800000011920929]

        Source: Pascanu, Mikolov and Bengio, On the difficulty of training RNNs, 2013.
        """
        if max_norm is max_value is None:
            raise GradtoolsError("clip_gradient: give max_norm, max_value or both.")
        if isinstance(x, (float, int)):
            _check_x_first("clip_gradient", x, "max_norm", max_norm)
        backend = self._backend
        bounds = max_norm, max_value
        kinds = (
            None if max_norm is None else bound_of(backend, "max_norm", max_norm),
            None if max_value is None else bound_of(backend, "max_value", max_value),
        )
        if ARRAY not in kinds:
            edited = backend.edited(self._clip_rule(1, *kinds), x)
            if edited is not None:
                return edited

        def edit(leaves: list[Array], places: list[int]) -> list[Array]:
            if ARRAY not in kinds:
                return backend.apply_rule(self._clip_rule(len(leaves), *kinds), *leaves)
            limits = [
                backend.real_scalar(bounds[i], leaves[0]) for i in (0, 1) if kinds[i] is ARRAY
            ]
            return backend.apply_rule_by_key(self._clip_key(len(leaves), *kinds), *leaves, *limits)

        return _edit(backend, "clip_gradient", edit, x)

    def transform_gradient(self, x: T, fn: Callable[[Any], Any]) -> T:
        """Replaces the gradient that flows through x with `fn(gradient)`, in reverse mode only.

        Args:
            x: A pytree of arrays.
            fn: Takes and returns a pytree like x, with the same shapes and dtypes (None at
                leaves that are not floating or complex). At second order fn is applied again. fn
                must not write into its argument in place, since other branches of the graph may
                share the memory, as in `torch.Tensor.register_hook`; clone the argument first.

        Returns:
            x, unchanged, to be used in place of x; only this result has the edited gradient.

        Raises:
            GradtoolsError: fn returns a different structure or shape; the edit is used in `gt.jvp`.

        Example:
            >>> x = gt.asarray(np.float32(3.0))
            >>> float(gt.grad(lambda x: gt.transform_gradient(x, lambda c: c + 1) ** 2)(x))
            7.0
        """
        order = "x comes first: transform_gradient(x, fn)." if callable(x) else ""
        check_function("transform_gradient", fn, "fn", curried=False, order=order)
        compiler = self._backend.compiler
        if not compiler.is_tracing():
            return self._transformed(x, fn)
        compiler.refuse(
            "transform_gradient takes a Python function, which compiled code silently drops "
            "under torch.func (pytorch#193279)"
        )
        return compiler.uncompiled(self._transformed, x, fn)

    def _transformed(self, x: Any, fn: Callable[[Any], Any]) -> Any:
        backend = self._backend

        def of_one(_: Any, cts: Any) -> list[Array]:
            ct = cts[0]
            new = noted(_OF_FN, fn, ct)
            if backend.is_array(new) and new.shape == ct.shape and new.dtype == ct.dtype:
                return [new]
            return _checked_cotangents(backend, new, ct, cts)

        if (edited := backend.edited(TRANSFORM, x, of_one)) is not None:
            return backend.tied(edited, fn)
        leaves, treedef = backend.flatten(x)
        places = [i for i, leaf in enumerate(leaves) if _edited(backend, leaf)]
        count, alone = len(leaves), len(leaves) == 1 and leaves[0] is x

        def cotangent(xs: Any, cts: Any) -> list[Any]:  # may outlive x, so x must not be captured
            full = replaced_at([None] * count, places, cts)
            transformed = noted(_OF_FN, fn, backend.unflatten(treedef, full))
            return _checked_cotangents(backend, transformed, backend.unflatten(treedef, full), cts)

        rule = Rule(
            "transform_gradient",
            primal=lambda *xs: list(xs),
            cotangent=of_one if alone else cotangent,
            saves=(),
            reaches="identity",
            reverse_only=True,
            user_functions=(fn,),
        )
        edited = _edit(backend, rule.name, lambda xs, places: backend.apply_rule(rule, *xs), x)
        return backend.tied(edited, fn)

    def replace_gradient(self, x: T, dx: Any) -> T:
        """Replaces the gradient that flows through x with `dx` (Theano's known_grads).

        If data flows from x to the output, x's gradient is dx, even where the incoming cotangent is
        zero. The gradient of each leaf is replaced separately. The edit supports reverse mode only.
        The gradient may itself be differentiated with respect to dx.

        Args:
            x: A pytree of arrays.
            dx: A pytree like x, with the same shapes and dtypes.

        Returns:
            x, unchanged, to be used in place of x; only this result has the edited gradient.

        Raises:
            GradtoolsError: dx differs from x in structure, shape or dtype; the edit is used in
                `gt.jvp`.

        Example:
            >>> x = gt.asarray(np.float32(3.0))
            >>> dx = gt.asarray(np.float32(5.0))
            >>> float(gt.grad(lambda x: gt.replace_gradient(x, dx) ** 2)(x))
            5.0

        Source: Theano's ``theano.gradient.grad(known_grads=...)``.
        """
        backend = self._backend
        leaves, treedef = backend.flatten(x)
        given, given_def = backend.flatten_like(treedef, dx)
        if not is_same(treedef, given_def):
            raise GradtoolsError(
                f"replace_gradient: dx has the structure {in_words(given_def)}; expected the "
                f"structure of x, {in_words(treedef)}. Pass one array for each array of x."
            )
        if not any(_edited(backend, leaf) for leaf in leaves):
            _check_editable(backend, "replace_gradient", x, leaves)
        for i, (leaf, new) in enumerate(zip(leaves, given, strict=True)):
            if _edited(backend, leaf):
                path = lambda i=i: backend.leaf_paths(x)[i]
                names = lambda path=path: (f"dx{path()}", f"x{path()}")
                new = matching(backend, "replace_gradient", new, leaf, names)
                leaves[i] = backend.apply_rule(REPLACE_COTANGENT, leaf, new)[0]
        return backend.unflatten(treedef, leaves)

    def straight_through(
        self, f: Callable[P, R], surrogate: Callable[..., Any] | None = None
    ) -> Callable[P, R]:
        """Creates a function with exactly the value of `f` and the derivative of `surrogate`.

        The derivative is correct in forward and reverse mode and at every order; f itself is never
        differentiated and receives detached inputs. f may be a NumPy function.

        Args:
            f: Any function; a boolean or integer result is cast to the surrogate's dtype.
            surrogate: A differentiable function whose results have f's shapes. If None, the
                surrogate is the identity.

        Returns:
            A function with f's arguments.

        Raises:
            GradtoolsError: (When called) f and surrogate differ in structure, shape or dtype.

        Example:
            >>> hard = gt.straight_through(lambda x: x > 0.5, lambda x: x * x)
            >>> x = gt.asarray(np.float32(3.0))
            >>> float(hard(x)), float(gt.grad(hard)(x))
            (1.0, 6.0)

        Source: Bengio, Leonard and Courville, Estimating or propagating gradients through
        stochastic neurons, 2013.
        """
        check_function("straight_through", f)
        if surrogate is not None:
            check_function("straight_through", surrogate, "surrogate", curried=False)
        return StraightThrough(self._backend, f, surrogate)


# --- helpers -----------------------------------------------------------------------------


@lru_cache(maxsize=128)
def _scaling(factor: str) -> Rule:
    """Returns the rule for a constant factor; the hexadecimal key distinguishes 0.0 and -0.0."""
    number = float.fromhex(factor)
    is_negation = number == -1.0

    def scale(_: Any, moved: Any) -> list[Any]:
        v = moved[0]
        return [None if v is None else -v if is_negation else number * v]

    return Rule(
        "scale_gradient",
        primal=lambda x: [x],
        tangent=scale,
        cotangent=scale,
        saves=(),
        reaches="identity",
    )


_OF_FN = "transform_gradient calls fn(gradient)."
_OF_SURROGATE = "straight_through calls the surrogate with f's arguments."


def _edited(backend: Backend, leaf: Any) -> bool:
    return backend.is_array(leaf) and backend.is_inexact(leaf)


def check_reversal(caller: str, scale: Any) -> None:
    """Raises an error if the scale of a gradient reversal is a negative number."""
    if isinstance(scale, (float, int, np.number)) and scale < 0:
        raise GradtoolsError(
            f"{caller}: scale is {scale}; it must not be negative. For a factor of either sign "
            "use scale_gradient."
        )


def _check_x_first(name: str, x: Any, option: str, given: Any) -> None:
    """Raises an error if the option `given` is an array with axes: x and the option are swapped."""
    if getattr(given, "shape", ()) != ():
        raise GradtoolsError(
            f"{name}: x is the number {x} and {option} is {shown(given)}; x comes first: "
            f"{name}(x, {option})."
        )


def _check_editable(backend: Backend, name: str, x: Any, leaves: list[Any]) -> None:
    """Raises an error if x is an opaque object, because arrays in the object are not edited."""
    if len(leaves) != 1 or leaves[0] is not x or hasattr(x, "dtype"):
        return
    if not isinstance(x, (str, int, float, complex)):
        raise GradtoolsError(
            f"{name}: x is {describe(backend, x)}, which contains no array; expected an array "
            f"or a pytree of arrays. Apply {name} to the arguments or outputs of a function or "
            "module, or to the arrays in another object."
        )


def _edit(
    backend: Backend, name: str, edit: Callable[[list[Array], list[int]], Any], x: Any
) -> Any:
    """Replaces the floating and complex leaves of x with `edit(leaves, places)`."""
    if _edited(backend, x):
        return edit([x], [0])[0]
    leaves, treedef = backend.flatten(x)
    places = [i for i, leaf in enumerate(leaves) if _edited(backend, leaf)]
    if not places:
        _check_editable(backend, name, x, leaves)
        return backend.unflatten(treedef, leaves)
    edited = edit([leaves[i] for i in places], places)
    return backend.unflatten(treedef, replaced_at(leaves, places, edited))


def _stopped(backend: Backend, name: str, x: Any) -> Any:
    stop = lambda leaves, places: [*map(backend.stop_gradient, leaves)]
    return _edit(backend, name, stop, x)


def _checked_cotangents(backend: Backend, tree: Any, like: Any, cts: Any) -> list[Array]:
    """Flattens `tree`, the result of `fn`; rejects a leaf that does not match its cotangent."""
    expected = backend.flatten(like)[1]
    leaves, treedef = backend.flatten_like(expected, tree)
    if not is_same(treedef, expected):
        raise GradtoolsError(
            f"transform_gradient: fn returned the structure {in_words(treedef)}; expected the "
            f"structure of the cotangent, {in_words(expected)}. Return one array for each array "
            "that fn receives."
        )
    names = lambda i: (f"fn's leaf {i}", "the cotangent")
    return [
        matching(backend, "transform_gradient", new, ct, partial(names, i))
        for i, (new, ct) in enumerate(zip(leaves, cts, strict=True))
    ]


class StraightThrough:
    """The function that `straight_through(f, surrogate)` returns; its repr names both functions."""

    def __init__(self, backend: Backend, f: Any, surrogate: Any) -> None:
        self._backend, self._f, self._surrogate = backend, f, surrogate
        self._through = "identity" if surrogate is None else name_of(surrogate)
        self._name = name_of(f)
        self.__name__ = f"straight_through({self._name})"
        self.__wrapped__ = f
        of = "the identity" if surrogate is None else self._through
        doc = f"Computes the value of {self._name}, with the derivative of {of}."
        self.__doc__ = "\n\n".join([text for text in (doc, getattr(f, "__doc__", None)) if text])

    def __repr__(self) -> str:
        return f"<straight_through {self._name}, derivative of {self._through}>"

    @user_facing
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns f(*args, **kwargs), with the derivative of the surrogate."""
        backend, name, hint = self._backend, self._name, ""
        if self._surrogate is not None:
            through = noted(_OF_SURROGATE, self._surrogate, *args, **kwargs)
        elif len(args) == 1 and not kwargs:
            through, hint = args[0], " (by default the identity)"
        else:
            raise GradtoolsError(
                f"straight_through: {name} was called with {len(args)} positional and "
                f"{len(kwargs)} keyword arguments; without a surrogate it is differentiated as the "
                "identity, which takes one argument. Give a surrogate."
            )
        if self._surrogate is None and _edited(backend, through):  # a single array
            value = backend.call_on_host(self._f, backend.stop_gradient(through), through)
            if backend.is_array(value):
                alike = value.shape == through.shape and value.dtype == through.dtype
                if alike and not backend.compiler.is_tracing():
                    edited = backend.edited(THROUGH, through, value=value)
                    if edited is not None:
                        return edited
                return self._leaf(0, value, through, hint)
        else:
            stopped = [x and _stopped(backend, "straight_through", x) for x in (args, kwargs)]
            both = lambda stopped: self._f(*stopped[0], **stopped[1])
            value = backend.call_on_host(both, stopped, through)
        leaves, treedef = backend.flatten(through)
        values, value_def = backend.flatten_like(treedef, value)
        if not is_same(value_def, treedef):
            missing = f" {NO_RETURN}" if value is None else ""
            raise GradtoolsError(
                f"straight_through: {name} returned the structure {in_words(value_def)}, but "
                f"its surrogate{hint} has the structure {in_words(treedef)}.{missing}"
            )
        pairs = enumerate(zip(values, leaves, strict=True))
        return backend.unflatten(treedef, [self._leaf(i, v, s, hint) for i, (v, s) in pairs])

    def _leaf(self, i: int, value: Any, through: Any, hint: str) -> Array:
        backend, own, its = self._backend, f"leaf {i} of {self._name}", f"leaf {i} of the surrogate"
        through = as_array(backend, "straight_through", through, its)
        if not backend.is_array(value):
            value = backend.cast(as_array(backend, "straight_through", value, own), through)
        elif not backend.is_inexact(value):
            value = backend.cast(value, through)
        fix = "Reshape or cast the array, or pass a surrogate whose result has this shape."
        names = lambda: (own, its + hint)
        value = matching(backend, "straight_through", value, through, names, fix)
        return backend.apply_rule(STRAIGHT_THROUGH, value, through)[0]
