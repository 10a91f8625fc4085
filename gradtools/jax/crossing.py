"""Equations that call a function of another framework, and do no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from gradtools.crossings import Crossed
from gradtools.jax import flops


def crossing(eqn: Any) -> Crossed | None:
    """The call that an equation is; None for any other equation."""
    places: Sequence[int] = range(len(eqn.invars))
    while eqn.primitive.name != "gradtools_kernel":
        if not getattr(eqn.params.get("rule"), "crosses", False):
            return None
        (body,) = flops.bodies(eqn)
        jaxpr, known = body.jaxpr, dict(zip(body.jaxpr.invars, places, strict=True))
        if len(jaxpr.eqns) != 1 or jaxpr.outvars != jaxpr.eqns[0].outvars:
            return None
        (eqn,) = jaxpr.eqns
        if any(isinstance(a, Literal) or a not in known for a in eqn.invars):
            return None
        places = [known[a] for a in eqn.invars]
    inside = eqn.params["call"].kernel.inside
    return inside and Crossed(inside, tuple(places), eqn.params["batch"])
