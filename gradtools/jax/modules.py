"""A JAX module as a pure function of its parameters and state.

flax.linen, flax.nnx and equinox each split a module from its arrays in their own way; here each
becomes ``apply(params, state, *args, key=None) -> (out, new_state)``. A library is looked for
only among what the program has imported already: a module of a class that is not loaded cannot
exist. ``gradtools.models`` documents the public name.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from gradtools import keras_models
from gradtools.errors import GradtoolsError, is_of
from gradtools.jax.arrays import check_key
from gradtools.jax.known_errors import NEEDS_KEY, says
from gradtools.keras_models import is_keras

Apply = Callable[..., tuple[Any, Any]]
Layout = dict[str, tuple[int, ...]]  # the shape of each leaf, by its path
MODES = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}  # what each is when training


def functionalize(
    module: Any,
    *,
    variables: Any = None,
    train: bool | None = None,
    rng_names: tuple[str, ...] = ("dropout",),
) -> tuple[Apply, Any, Any]:
    """``(apply, params, state)`` of a module. See ``gradtools.models``."""
    if _is_a("flax.linen", module):
        return _from_linen(module, variables, train, rng_names)
    if _is_a("flax.nnx", module):
        return _from_nnx(module, variables, train)
    if _is_a("equinox", module):
        return _from_equinox(module, variables, train)
    if is_keras(module):
        return keras_models.functionalize(module, variables, train, _KERAS)
    if _is_of_haiku(module):
        return _from_haiku(module, variables, train)
    raise GradtoolsError(
        f"functionalize: got a {type(module).__module__}.{type(module).__qualname__}; the JAX "
        "backend accepts a flax.linen, flax.nnx or equinox Module, what haiku's transform gives, "
        "and a Keras model."
    )


def _is_a(library: str, module: Any) -> bool:
    loaded = sys.modules.get(library)
    return loaded is not None and isinstance(module, loaded.Module)


# flax.linen


def _from_linen(module: Any, variables: Any, train: bool | None, rng_names: tuple) -> tuple:
    if variables is None:
        raise GradtoolsError(
            "functionalize: a flax.linen module does not hold its arrays; give "
            "variables=module.init(key, *args)."
        )
    params = variables.get("params", {})
    state = {name: tree for name, tree in variables.items() if name != "params"}
    mode = _mode(f"{type(module).__name__}.__call__", type(module).__call__, train)
    layout = _layout(params)

    return partial(_apply_linen, module, mode, layout, rng_names), params, state


def _apply_linen(
    module: Any,
    mode: dict[str, bool],
    layout: Layout,
    rng_names: tuple[str, ...],
    /,
    params: Any,
    state: Any,
    *args: Any,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    _check_layout(params, layout)
    rngs = None
    if key is not None:
        rngs = dict(zip(rng_names, _keys(key, len(rng_names)), strict=True))
    call = {"rngs": rngs, "mutable": list(state), **mode, **kwargs}
    out, updates = _linen_call(module, {"params": params, **state}, args, call, rng_names)
    return out, {**state, **updates}


def _linen_call(module: Any, variables: dict, args: tuple, call: dict, rng_names: tuple) -> Any:
    try:
        return module.apply(variables, *args, **call)
    except sys.modules["flax.errors"].InvalidRngError as error:
        mend = "pass key= to apply"
        if call["rngs"] is not None:
            mend = f"name the stream in functionalize's rng_names, which are {rng_names}"
        raise _no_key(error, mend) from error


def _mode(name: str, call: Callable[..., Any], train: bool | None) -> dict[str, bool]:
    """The keyword by which a function learns that it is training."""
    if train is None:
        return {}
    names = inspect.signature(call).parameters
    mode = {name: train == sense for name, sense in MODES.items() if name in names}
    if not mode:
        raise GradtoolsError(
            f"functionalize: {name} has none of the arguments "
            f"{', '.join(MODES)}, so train={train} cannot be passed on. Leave train=None and "
            "give apply the keyword that your module knows."
        )
    return mode


# flax.nnx


def _from_nnx(module: Any, variables: Any, train: bool | None) -> tuple:
    if variables is not None:
        raise GradtoolsError(
            "functionalize: a flax.nnx module holds its own arrays; leave variables=None."
        )
    nnx = sys.modules["flax.nnx"]
    graph, params, streams, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    params, state = _fresh((params, {"rngs": streams, "variables": rest}))
    layout = _layout(params)
    known = set(nnx.to_flat_state(rest).paths)

    return partial(_apply_nnx, graph, layout, known, train), params, state


def _apply_nnx(
    graph: Any,
    layout: Layout,
    known: set[Any],
    train: bool | None,
    /,
    params: Any,
    state: Any,
    *args: Any,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    nnx = sys.modules["flax.nnx"]
    _check_layout(params, layout)
    model = nnx.merge(graph, params, state["rngs"], state["variables"], copy=True)
    if train is not None:
        model.train() if train else model.eval()
    if key is not None:
        _reseed(nnx, model, key)
    out = model(*args, **kwargs)
    streams, rest = nnx.state(model, nnx.RngState, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    rest = nnx.from_flat_state([(p, v) for p, v in nnx.to_flat_state(rest) if p in known])
    return out, {"rngs": streams if key is None else state["rngs"], "variables": rest}


def _reseed(nnx: Any, model: Any, key: jax.Array) -> None:
    """Each random stream of the model gets a key of its own, in the shape that it has."""
    streams = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream)]
    for own, stream in zip(_keys(key, len(streams)), streams, strict=True):
        shape = stream.key.get_value().shape
        stream.key.set_value(jax.random.split(own, shape) if shape else own)
        stream.count.set_value(jax.numpy.zeros(shape, jax.numpy.uint32))


# equinox


def _from_equinox(module: Any, variables: Any, train: bool | None) -> tuple:
    eqx = sys.modules["equinox"]
    if variables is not None and not isinstance(variables, eqx.nn.State):
        raise GradtoolsError(
            "functionalize: for an equinox module variables is the eqx.nn.State of "
            f"eqx.nn.make_with_state, or None; got a {type(variables).__name__}."
        )
    if train is not None:
        module = eqx.nn.inference_mode(module, value=not train)
    params, static = eqx.partition(module, eqx.is_inexact_array)
    layout, stateful = _layout(params), variables is not None
    parameters = inspect.signature(module.__call__).parameters
    takes_key = any(n == "key" or p.kind is p.VAR_KEYWORD for n, p in parameters.items())

    apply = partial(_apply_equinox, static, layout, stateful, takes_key)
    return apply, params, variables if stateful else {}


def _apply_equinox(
    static: Any,
    layout: Layout,
    stateful: bool,
    takes_key: bool,
    /,
    params: Any,
    state: Any,
    *args: Any,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    _check_layout(params, layout)
    if key is not None:
        check_key("apply", key)
    if takes_key:
        kwargs = {"key": key, **kwargs}
    model = sys.modules["equinox"].combine(params, static)
    if not stateful:
        return _equinox_call(model, args, kwargs), state
    # equinox invalidates a State that is written to: hand over another one
    return _equinox_call(model, (*args, _fresh(state)), kwargs)


def _equinox_call(model: Any, args: tuple, kwargs: dict) -> Any:
    try:
        return model(*args, **kwargs)
    except RuntimeError as error:
        if kwargs.get("key", True) is None and says(error, NEEDS_KEY, package="equinox"):
            raise _no_key(error) from error
        raise


def _fresh(tree: Any) -> Any:
    """The same arrays in containers of their own."""
    return jax.tree.map(lambda leaf: leaf, tree)


# haiku


def _is_of_haiku(module: Any) -> bool:
    haiku = sys.modules.get("haiku")
    return haiku is not None and isinstance(
        module, (haiku.Transformed, haiku.TransformedWithState, haiku.MultiTransformed)
    )


def _from_haiku(module: Any, variables: Any, train: bool | None) -> tuple:
    stateful = isinstance(module, sys.modules["haiku"].TransformedWithState)
    if not callable(module.apply):
        raise GradtoolsError(
            "functionalize: a haiku multi_transform has several apply functions; transform the one "
            "that you mean by hk.transform or hk.transform_with_state."
        )
    if variables is None:
        init = "params, state = f.init(key, *args)" if stateful else "params = f.init(key, *args)"
        given = "(params, state)" if stateful else "params"
        raise GradtoolsError(
            f"functionalize: what haiku's transform gives holds no arrays; write {init}, and give "
            f"variables={given}."
        )
    params, state = variables if stateful else (variables, {})
    mode = _mode("the transformed function", module.apply, train)
    takes_key = "rng" in inspect.signature(module.apply).parameters
    return (
        partial(_apply_haiku, module.apply, stateful, takes_key, mode, _layout(params)),
        (params),
        state,
    )


def _apply_haiku(
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
    _check_layout(params, layout)
    if key is not None:
        check_key("apply", key)
        if not takes_key:
            raise GradtoolsError(
                "apply: the function was made by haiku's without_apply_rng, which takes no key. "
                "Give none, or functionalize what transform gave."
            )
    given = (params, state) if stateful else (params,)
    try:
        out = apply(*given, *((key,) if takes_key else ()), *args, **{**mode, **kwargs})
    except ValueError as error:
        if key is None and takes_key and is_of("haiku", error):
            raise _no_key(error) from error
        raise
    return out if stateful else (out, state)


# Keras


def _keras_seeds(key: jax.Array, count: int) -> list[jax.Array]:
    return [jax.random.bits(k, (2,), "uint32") for k in _keys(key, count)]


_KERAS = keras_models.KerasWing("jax", lambda x: x, lambda x: x, _keras_seeds)


# Keys and checks


def _keys(key: jax.Array, count: int) -> list[jax.Array]:
    check_key("apply", key)
    return list(jax.random.split(key, max(count, 1)))[:count]


def _no_key(error: Exception, mend: str = "pass key= to apply") -> GradtoolsError:
    return GradtoolsError(f"apply: the module needs randomness; {mend}. ({error})")


def _layout(params: Any) -> Layout:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path): jax.numpy.shape(leaf) for path, leaf in leaves}


def _check_layout(params: Any, expected: Layout) -> None:
    result = _layout(params)
    if result == expected:
        return
    missing = [path for path in expected if path not in result]
    unexpected = [path for path in result if path not in expected]
    if missing or unexpected:
        raise GradtoolsError(
            "apply: params must hold the leaves that functionalize returned; missing: "
            f"{missing or 'none'}, unexpected: {unexpected or 'none'}."
        )
    path = next(path for path in expected if result[path] != expected[path])
    raise GradtoolsError(
        f"apply: params{path} has shape {result[path]}, the module's has {expected[path]}. Give an "
        "array of that shape."
    )
