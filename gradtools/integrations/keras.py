"""Converts a Keras 3 model to a pure function of its variables, on PyTorch or JAX.

Keras has a pure call, `stateless_call`, which takes the variables as a list; `make_functional`
addresses the variables by path. Each gradtools backend provides a `KerasBackend`, which defines how
arrays are detached, and how the seeds of Keras' random streams are computed from a key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradtools.arguments.checks import check_names
from gradtools.errors import GradtoolsError

_SEED = "seed_generator_state"  # Keras' name for the variable of a random stream


def is_keras(module: Any) -> bool:
    """Returns whether a module is a Keras layer or model."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(module, keras.Layer)


def refusal(caller: str, name: str, model: Any) -> GradtoolsError:
    """Returns the error for a Keras model that was passed in place of a pytree of arrays."""
    return GradtoolsError(
        f"{caller}: {name} is a Keras model ({type(model).__name__}), which is not a "
        "pytree of its variables. Call `apply, params, state = gt.make_functional(model, "
        "train=True)` and differentiate apply with respect to params."
    )


@dataclass(frozen=True)
class KerasBackend:
    """The functions of a framework that `make_functional` uses.

    Attributes:
        name: Keras' name of the backend.
        alias: Detaches a variable's value.
        settled: Detaches the new value of a variable that is not trained.
        seeds: Maps `(key, count)` to `count` seeds of random streams, each a pair of integers.
        drawing: Maps `(key, arrays)` to a context manager that seeds the random numbers drawn
            outside of Keras' streams.
    """

    name: str
    alias: Callable[[Any], Any]
    settled: Callable[[Any], Any]
    seeds: Callable[[Any, int], Sequence[Any]]
    drawing: Callable[[Any, Any], AbstractContextManager[Any]] = lambda key, arrays: nullcontext()


def make_functional(
    module: Any, variables: Any, train: bool | None, framework: KerasBackend
) -> tuple:
    """Returns ``(apply, params, state)``: params and state map variable paths to arrays."""
    keras = sys.modules["keras"]
    backend = keras.backend.backend()
    if backend != framework.name:
        raise GradtoolsError(
            f"make_functional: this Keras model runs on {backend}, not on "
            f"{framework.name}. Set KERAS_BACKEND={framework.name} before Keras is imported, or "
            f"use gradtools.{backend}."
        )
    if variables is not None:
        raise GradtoolsError(
            "make_functional: a Keras model contains its variables; leave variables=None."
        )
    if not module.built:
        raise GradtoolsError(
            f"make_functional: {type(module).__name__} has no variables yet. First call the model "
            "on an example, or call build(input_shape)."
        )
    free, rest = _by_path(module.trainable_variables), _by_path(module.non_trainable_variables)
    params = {path: framework.alias(v.value) for path, v in free.items()}
    state = {path: framework.alias(v.value) for path, v in rest.items()}
    layout = {path: tuple(v.shape) for path, v in free.items()}
    streams = [path for path, v in rest.items() if v.name == _SEED]
    return partial(apply, module, framework, train, layout, tuple(rest), streams), params, state


def apply(
    module: Any,
    framework: KerasBackend,
    train: bool | None,
    layout: Mapping[str, tuple[int, ...]],
    rest: Sequence[str],
    streams: Sequence[str],
    /,
    params: Mapping[str, Any],
    state: Mapping[str, Any],
    *args: Any,
    key: Any = None,
    **kwargs: Any,
) -> tuple[Any, dict[str, Any]]:
    """Returns the module's output and its new state."""
    check_names("params", params, layout)
    check_names("state", state, rest)
    for path, shape in layout.items():
        if tuple(params[path].shape) != shape:
            raise GradtoolsError(
                f"apply: params[{path!r}] has shape {tuple(params[path].shape)}, expected "
                f"{shape}, the shape of the model's variable."
            )
    now = dict(state)
    if key is not None:
        now |= dict(zip(streams, framework.seeds(key, len(streams)), strict=True))
    if train is not None:
        kwargs = {"training": train, **kwargs}
    free, fixed = [params[p] for p in layout], [now[p] for p in rest]
    with nullcontext() if key is None else framework.drawing(key, (free, args)):
        out, after = module.stateless_call(free, fixed, *args, **kwargs)
    new = {path: framework.settled(x) for path, x in zip(rest, after, strict=True)}
    return out, new if key is None else {**new, **{path: state[path] for path in streams}}


def _by_path(variables: Sequence[Any]) -> dict[str, Any]:
    """Returns a dict from paths to variables; repeated paths get a numeric suffix."""
    result: dict[str, Any] = {}
    for v in variables:
        path, n = v.path, 1
        while path in result:
            path, n = f"{v.path}_{n}", n + 1
        result[path] = v
    return result
