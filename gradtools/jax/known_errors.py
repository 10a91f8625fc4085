"""Re-raises known JAX errors, with advice for users.

JAX raises plain ValueErrors and TypeErrors, so this module identifies errors by their texts, and
checks in the traceback that JAX raised the error. Errors of the user's code propagate unchanged.
Other modules of this backend do not read error texts. If JAX rewords an error, the error is raised
without advice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from gradtools.code_origin import place_of
from gradtools.errors import refusal, said_by
from gradtools.rules import USE_REVERSE_MODE


@contextmanager
def explained(caller: str, f: str = "f") -> Iterator[None]:
    """Context manager that re-raises known JAX errors with advice on the function f."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        advice = next((a for part, a in _ADVICE.items() if says(error, part)), None)
        if advice is None:
            raise
        message = f"{caller}: {f}{advice[1:]} JAX says{place_of(error)}: {error}"
        raise refusal(error, message) from error


def says(error: BaseException, *parts: str, package: str = "jax") -> bool:
    """Returns whether the package raised the error and its text contains one of the parts."""
    text = said_by(package, error)
    return any(part in text for part in parts)


def refused_number(error: BaseException) -> str:
    """Returns the failed conversion that JAX's error names: "float", "int", "complex" or ""."""
    conversion = str(error).partition("The problem arose with the `")[2].partition("`")[0]
    return conversion if conversion in ("float", "int", "complex") else ""


READS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""JAX's errors for a program that needs the value of an array while it is traced."""
CALLS_JAX = "no_execution config option"  # text of an error of `jax.no_execution`
NO_VALUES = (
    "is traced, so its arrays have no values. Instead of a Python if use jnp.where or "
    "jax.lax.cond, and instead of NumPy use jnp or a gt.host_function."
)
NEEDS_KEY = "key"  # text in errors of equinox modules that draw random numbers

_HOST = (
    "f calls a function outside of JAX, for which JAX has no derivative. Make the function "
    "a gt.host_function with a rule, or wrap the call in gt.custom_rule and define a rule."
)
_FORWARD_ONLY = (
    "f contains an operation with a forward rule only, such as a Pallas kernel. Wrap the "
    "operation in gt.custom_rule and define a reverse rule, or use forward mode: gt.jvp."
)
_ADVICE = {
    "allbacks do not support": _HOST,  # raised for pure, io and buffer callbacks
    "The FFI call to": _HOST,
    "Linearization failed to produce known values": _FORWARD_ONLY,
    "Reverse-mode differentiation does not work for lax.while_loop": (
        "f contains a loop with an unknown number of iterations, which does not support reverse "
        "mode. Use lax.scan, a fori_loop with Python integers as bounds, or forward mode: "
        "gt.jvp, gt.jacobian(mode='forward')."
    ),
    "forward-mode autodiff (jvp) to a custom_vjp": (
        "f contains a function with a reverse rule only (clip_gradient, transform_gradient, "
        f"replace_gradient, or a jax.custom_vjp), so it has no forward mode. {USE_REVERSE_MODE}"
    ),
    "Differentiation rule for": (
        "f contains a primitive without a derivative in JAX. Wrap the primitive in gt.custom_rule "
        "and define a rule."
    ),
    "Transpose rule (for reverse-mode differentiation) for": _FORWARD_ONLY,
}
