"""Rejects arrays of the other framework, which PyTorch and JAX would treat as constants.

For example, without this check `gradtools.torch.reverse_gradient` would have no effect on a
`jax.Array`. Operators detect foreign arrays when they flatten an argument
(`integrations/containers.py`). The other framework is looked up in `sys.modules`, and never
imported.
"""

from __future__ import annotations

import sys
from typing import Any

from gradtools.errors import GradtoolsError

_OTHER = {"torch": "jax", "jax": "torch"}
_ARRAYS = {"torch": "Tensor", "jax": "Array"}


def foreign_class(framework: str) -> Any:
    """Returns the other framework's array class; returns () if that framework is not imported."""
    other = _OTHER.get(framework, "")
    return getattr(sys.modules.get(other), _ARRAYS.get(other, ""), ())


def is_foreign(framework: str, x: Any) -> bool:
    """Returns whether x is an array of the other framework."""
    # A literal of a jaxpr is a number that is registered as a jax.Array.
    return isinstance(x, foreign_class(framework)) and not isinstance(x, (int, float, complex))


def refuse_foreign(framework: str, x: Any, path: str = "") -> None:
    """Raises an error if x, the leaf at `path`, is an array of the other framework."""
    if is_foreign(framework, x):
        other = _OTHER[framework]
        raise GradtoolsError(
            f"gradtools.{framework} was given a {other}.{_ARRAYS[other]} of shape "
            f"{tuple(x.shape)} and dtype {x.dtype}{path and f', {path}'}. Import gradtools.{other} "
            f"instead, or convert the array: gradtools.{framework}.asarray("
            f"gradtools.{other}.to_numpy(x))."
        )
