"""Errors of JAX that are known, each raised again with what to do about it.

JAX raises plain ValueErrors and TypeErrors, so one of its refusals is known by its text alone; that
the error is JAX's, by what raised it. What the user raises goes by as it is. No other room of this
wing reads what an error says: reworded upstream, JAX's own error is raised in place of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError, refusal, said_by
from gradtools.rules import USE_REVERSE_MODE


@contextmanager
def explained(caller: str) -> Iterator[None]:
    """JAX's refusals, in words that say what to do."""
    try:
        yield
    except REFUSALS as error:
        explain(caller, error)
        raise


@contextmanager
def flax_explained(caller: str) -> Iterator[None]:
    """flax's refusal to change a module inside of another trace, in our words."""
    errors = sys.modules.get("flax.errors")
    try:
        yield
    except Exception as error:
        if errors is None or not isinstance(error, errors.TraceContextError):
            raise
        raise GradtoolsError(
            f"{caller}: the function changes a flax.nnx module that belongs to another trace "
            f"(flax.errors.TraceContextError: {str(error).partition(' (')[0]}). Pass the module "
            "through flax's own transforms (nnx.jit, nnx.grad) or as an argument, or use "
            "gt.make_functional and pass its state on."
        ) from error


REFUSALS = TypeError, ValueError, NotImplementedError


def explain(caller: str, error: Exception) -> None:
    """Raises one of JAX's refusals in words that say what to do."""
    mend = next((m for part, m in _MENDS.items() if says(error, part)), None)
    if mend is not None:
        said = f"{caller}: {mend} JAX says{place_of(error)}: {error}"
        raise refusal(error, said) from error


def says(error: BaseException, *parts: str, package: str = "jax") -> bool:
    """Whether an error is the package's own, and says one of these."""
    text = said_by(package, error)
    return any(part in text for part in parts)


def refused_number(error: BaseException) -> str:
    """Which of `float`, `int` and `complex` a traced array was converted by, if JAX names it."""
    conversion = str(error).partition("The problem arose with the `")[2].partition("`")[0]
    return conversion if conversion in ("float", "int", "complex") else ""


NO_EFFECTS = "Effects not supported in partial-eval of `checkpoint`"
CALLS_JAX = "no_execution config option", "Disallowed"  # by `jax.no_execution`, the transfer guards
OTHER_PLATFORM = "lowering platform"
NEEDS_KEY = "key"  # a module of equinox that draws

_HOST = (
    "f calls a function outside of JAX, whose derivative JAX does not know. Make it a "
    "gt.host_function, or wrap the call in gt.custom_rule, and give it a rule."
)
_MENDS = {
    "allbacks do not support": _HOST,  # pure, io and buffer callbacks
    "The FFI call to": _HOST,
    "Linearization failed to produce known values": (
        "f holds an operation that has a forward rule only, as a Pallas kernel has. Wrap it in "
        "gt.custom_rule and give it a reverse rule, or push forward: gt.jvp."
    ),
    "Reverse-mode differentiation does not work for lax.while_loop": (
        "f holds a loop whose number of trips is known only when it runs, which has no reverse "
        "mode. Use lax.scan or a fori_loop between Python integers, or push forward: gt.jvp, "
        "gt.jacobian(mode='forward')."
    ),
    "forward-mode autodiff (jvp) to a custom_vjp": (
        "f holds a function that has a reverse rule only (clip_gradient, transform_gradient, "
        f"replace_gradient, or a jax.custom_vjp), so it has no forward mode. {USE_REVERSE_MODE}"
    ),
    "Differentiation rule for": (
        "f holds a primitive that has no derivative in JAX. Wrap it in gt.custom_rule and give it "
        "a rule."
    ),
    "Transpose rule (for reverse-mode differentiation) for": (
        "f holds a primitive that has a forward rule only. Wrap it in gt.custom_rule and give it a "
        "reverse rule, or push forward: gt.jvp."
    ),
}
