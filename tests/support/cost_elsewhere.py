"""The public names that the tables of costs leave out, and what must be in them."""

from __future__ import annotations

from typing import Any

# These have costs of their own in other tests, or none.
ELSEWHERE = {
    *("vmap", "compile"),  # the framework's own under one name
    "all_gather",  # needs several processes or devices
    *("implicit_solution", "retain_gradient", "retained_gradients"),  # nothing by hand is the same
    *(
        "xp",
        "asarray",
        "to_numpy",
        "random_key",
        "split_key",
        "ArraySpec",
        "is_recomputing",
    ),  # no derivative
    *("why_zero", "gradient_graph", "formula"),  # looked at, not run in a program
}


def without_case(gt: Any, cases: Any) -> set[str]:
    """The public operators of which there is no case, by name or by `name, mode`."""
    return set(gt.__all__) - {name.partition(",")[0] for name in cases} - ELSEWHERE
