"""haiku: transformed functions as pure functions of parameters and state."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from gradtools.errors import GradtoolsError, is_of
from gradtools.jax.arrays import check_key
from gradtools.jax.modules import Layout, check_layout, layout_of, mode_of, no_key


def make_functional(
    module: Any, variables: Any, train: bool | None, rng_names: tuple[str, ...]
) -> tuple:
    """``(apply, params, state)`` of a function transformed by haiku."""
    stateful = isinstance(module, sys.modules["haiku"].TransformedWithState)
    if not callable(module.apply):
        raise GradtoolsError(
            "make_functional: a haiku multi_transform has several apply functions; transform the "
            "one that you mean by hk.transform or hk.transform_with_state."
        )
    if variables is None:
        init = "params, state = f.init(key, *args)" if stateful else "params = f.init(key, *args)"
        given = "(params, state)" if stateful else "params"
        raise GradtoolsError(
            f"make_functional: what haiku's transform gives holds no arrays; write {init}, and "
            f"give variables={given}."
        )
    params, state = variables if stateful else (variables, {})
    mode = mode_of("the transformed function", module.apply, train)
    takes_key = "rng" in inspect.signature(module.apply).parameters
    return (
        partial(_apply, module.apply, stateful, takes_key, mode, layout_of(params)),
        params,
        state,
    )


def _apply(
    apply: Callable[..., Any],
    stateful: bool,
    takes_key: bool,
    mode: dict[str, bool],
    layout: Layout,
    /,
    params: Any,
    state: Any,
    *args: Any,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    check_layout(params, layout)
    if key is not None:
        check_key("apply", key)
        if not takes_key:
            raise GradtoolsError(
                "apply: the function was made by haiku's without_apply_rng, which takes no key. "
                "Give none, or make_functional what transform gave."
            )
    given = (params, state) if stateful else (params,)
    try:
        out = apply(*given, *((key,) if takes_key else ()), *args, **{**mode, **kwargs})
    except ValueError as error:
        if key is None and takes_key and is_of("haiku", error):
            raise no_key(error) from error
        raise
    return out if stateful else (out, state)
