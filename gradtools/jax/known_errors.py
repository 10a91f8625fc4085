"""Errors of JAX that are known, each raised again with what to do about it.

JAX raises plain ValueErrors and TypeErrors, so one of its refusals is known by its text alone; that
the error is JAX's, by what raised it. What the user raises goes by as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradtools.errors import place_of, refusal, said_by


@contextmanager
def explained(caller: str) -> Iterator[None]:
    """JAX's refusals, in words that say what to do."""
    try:
        yield
    except REFUSALS as error:
        explain(caller, error)
        raise


REFUSALS = TypeError, ValueError, NotImplementedError


def explain(caller: str, error: Exception) -> None:
    """Raises one of JAX's refusals in words that say what to do."""
    text = said_by("jax", error)
    mend = next((mend for part, mend in _MENDS.items() if part in text), None)
    if mend is not None:
        said = f"{caller}: {mend} JAX says{place_of(error)}: {error}"
        raise refusal(error, said) from error


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
        "known_gradient, or a jax.custom_vjp), which forward mode cannot enter. Use vjp or grad, "
        "or for second derivatives mode='reverse_over_reverse'."
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
