"""Lists the public names that need no case in the cost tables, and finds names that lack one."""

from __future__ import annotations

from typing import Any

# Public names whose costs are tested in other files or are negligible.
ELSEWHERE = {
    *("vmap", "compile"),  # Wrappers of the framework's own functions.
    "all_gather",  # Needs several processes or devices.
    # These operators have no handwritten equivalent.
    *("implicit_solution", "retain_gradient", "retained_gradients"),
    *(
        "xp",
        "asarray",
        "to_numpy",
        "random_key",
        "split_key",
        "ArraySpec",
        "is_recomputing",
    ),  # Functions without a derivative.
    *("why_zero", "gradient_graph", "formula"),  # Analysis tools.
}


def without_case(gt: Any, cases: Any) -> set[str]:
    """Return the public names that are not in ELSEWHERE and have no case `name` or `name, mode`."""
    return set(gt.__all__) - {name.partition(",")[0] for name in cases} - ELSEWHERE
