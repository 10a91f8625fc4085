"""Supports flax.nnx: the layer GradientReversal, pure functions, and modules in loops and rules.

A flax.nnx module mutates itself when it is called: dropout counts its draws, and batch
normalization updates its statistics. flax forbids such mutations inside of a trace to which the
module does not belong, such as the body of a scan. The body therefore works on a copy of the
module: its parameters are constants of the body, and its other state is a carry of the loop, which
is not differentiated. The final state is written to the original module.

Modules are found in f (f itself, the owner of a method, a `partial`, closures, the globals that f
uses, containers of these objects) and in the arguments of f.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Signature, signature
from types import FunctionType
from typing import Any

import jax
from flax import nnx

import gradtools.jax as gt
from gradtools.arguments.checks import check_kind, wrong_names
from gradtools.backend import Array
from gradtools.edits import check_reversal
from gradtools.errors import GradtoolsError
from gradtools.function_variables import (
    cells_of,
    globals_of,
    held_in,
    is_of_framework,
    with_parts,
)
from gradtools.jax import trees
from gradtools.jax._upstream import with_variables
from gradtools.jax.module_arguments import flattened
from gradtools.jax.modules import fresh, keys

_FlatState: Any = type(nnx.to_flat_state(nnx.State({})))
_STATES = Mapping, _FlatState  # the pytrees that nnx.merge accepts
_PARTS = "rngs", "variables"


class GradientReversal(nnx.Module):
    """A layer that returns its input and multiplies the gradient by ``-scale``.

    Args:
        scale: A real number; it is not a parameter. For a schedule under jit, pass ``scale`` in the
            call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gradtools.jax.nnx import GradientReversal
        >>> layer = GradientReversal(scale=0.5)
        >>> jax.grad(lambda x: layer(x).sum())(jnp.ones(2))
        Array([-0.5, -0.5], dtype=float32)
    """

    def __init__(self, scale: float = 1.0) -> None:
        check_reversal("GradientReversal", scale)
        self.scale = scale

    def __call__(self, x: Any, scale: Any = None) -> Any:
        """Returns x (an array or a pytree). ``scale``, if given, replaces the layer's scale."""
        return gt.reverse_gradient(x, self.scale if scale is None else scale)


class Transformed(nnx.Module):
    """A module whose ``__call__`` calls the function `make(module)`."""

    def __init__(self, module: Any, make: Callable[[Any], Callable[..., Any]]) -> None:
        self.module, self.make = module, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function `make(module)` with the given arguments."""
        return self.make(self.module)(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:  # `in_axes` names the module's parameters
        return signature(self.module)


# --- a module as a pure function


def make_functional(
    module: nnx.Module, variables: Any, train: bool | None, rng_names: tuple[str, ...]
) -> tuple:
    """Returns ``(apply, params, state)``; `rng_names` is unused, since modules name the streams."""
    if variables is not None:
        raise GradtoolsError(
            "make_functional: a flax.nnx module contains its arrays; leave variables=None."
        )
    graph, params, *others = nnx.split(module, nnx.Param, nnx.RngState, ...)
    streams, rest = others
    params, state = fresh((params, {"rngs": streams, "variables": rest}))
    known = set(nnx.to_flat_state(rest).paths)

    return partial(apply, graph, known, _names(params, state), train), params, state


def apply(
    graph: Any,
    known: set[Any],
    names: list[Any],
    train: bool | None,
    /,
    params: Any,
    state: Any,
    *args: Any,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Returns the module's output and its new state."""
    _check_call(names, params, state)
    model = nnx.merge(graph, params, state["rngs"], state["variables"], copy=True)
    if train is not None:
        model.train() if train else model.eval()
    if key is not None:
        _reseed(model, key)
    out = model(*args, **kwargs)
    streams, rest = nnx.state(model, nnx.RngState, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    rest = nnx.from_flat_state([(p, v) for p, v in nnx.to_flat_state(rest) if p in known])
    return out, {"rngs": streams if key is None else state["rngs"], "variables": rest}


def _check_call(names: list[Any], params: Any, state: Any) -> None:
    """Raises an error if params or state lacks attributes or contains unknown attributes.

    A variable may be moved between params and state, for example to freeze a parameter.
    """
    check_kind("params", params, _STATES, "an nnx.State")
    check_kind("state", state, Mapping, "a dictionary with the keys 'rngs' and 'variables'")
    if missing := [name for name in _PARTS if name not in state]:
        raise wrong_names("state", missing, [name for name in state if name not in _PARTS])
    for name in _PARTS:
        check_kind(f"state[{name!r}]", state[name], _STATES, "an nnx.State")
    given = _names(params, state)
    missing = [name for name in names if name not in given]
    unexpected = [name for name in given if name not in names]
    if missing or unexpected:
        raise wrong_names("params", missing, unexpected)


def _names(params: Any, state: Any) -> list[Any]:
    """Returns the names of the module's attributes in params and state."""
    trees = params, *[state[name] for name in _PARTS]
    paths = [t.paths if isinstance(t, _FlatState) else [(name,) for name in t] for t in trees]
    return [*dict.fromkeys(path[0] for part in paths for path in part)]


def _reseed(model: Any, key: jax.Array) -> None:
    """Assigns a new key of the same shape to each random stream of the model."""
    streams = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream)]
    has_methods = hasattr(nnx.Variable, "set_value")  # flax 0.11 has only the property `value`
    for own, stream in zip(keys(key, len(streams)), streams, strict=True):
        shape = stream.key.get_value().shape if has_methods else stream.key.value.shape
        new = jax.random.split(own, shape) if shape else own
        count = jax.numpy.zeros(shape, jax.numpy.uint32)
        for variable, value in ((stream.key, new), (stream.count, count)):
            if has_methods:
                variable.set_value(value)
            else:
                variable.value = value


# --- modules inside of loops and rules


def stateful(caller: str, f: Callable[..., Any], args: Any) -> Stateful | None:
    """Wraps f with the state of the modules in f and in `args`, a pair `(args, kwargs)` or ().

    Returns None if there are no modules.
    """
    own, given = _modules(f), _variables(flattened((nnx.Variable,), args)[0])
    return Stateful(caller, f, own, given) if own or given else None


class Stateful:
    """A function f, with the state of its modules as flat arrays before and after a call.

    The modules in the arguments of a call are copies. If two modules refer to the same variable,
    the variable was copied twice, and the call replaces the two copies with one.

    Attributes:
        leaves: The current state of the user's modules.
        now: The state from which the next call starts.
        after: The state after the latest call.
        changed: For each leaf, whether any call has changed the leaf.
    """

    def __init__(self, caller: str, f: Any, own: list[Any], given: list[Any]) -> None:
        self.caller, self.f = caller, f
        first: dict[int, int] = {}
        self._first = [first.setdefault(id(x), k) for k, x in enumerate(given)]
        self._own, self._given = tuple(own), self._unique(given)
        self._graph, self._params, *others = nnx.split(self._own, nnx.Param, ...)
        states = others[0], self._state(self._given)
        self._known = [set(nnx.to_flat_state(s).paths) for s in states]
        self.leaves, self._treedef = jax.tree.flatten(states)
        self.now, self.after = list(self.leaves), list(self.leaves)
        self.changed = [False] * len(self.leaves)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls f with copies of its modules, whose state is `now`."""
        rest, of_given = jax.tree.unflatten(self._treedef, self.now)
        own = nnx.merge(self._graph, self._params, rest, copy=True)
        (args, kwargs), given = self._shared((args, kwargs))
        copies = {id(old): new for old, new in zip(self._own, own, strict=True)}
        nnx.update(given, of_given)
        out = _with_copies(self.f, copies)(*args, **kwargs)
        result = self._kept(self._state(own), 0), self._kept(self._state(given), 1)
        self.after = jax.tree.leaves(result)
        pairs = zip(self.changed, self.after, self.now, strict=True)
        self.changed = [c or new is not old for c, new, old in pairs]
        return out

    def write(self, leaves: Sequence[Array]) -> None:
        """Updates the user's modules with the leaves that the calls changed.

        Args:
            leaves: The leaves of the whole state.
        """
        if not any(self.changed):
            return
        numbered = jax.tree.unflatten(self._treedef, list(range(len(leaves))))
        for modules, state in zip((self._own, self._given), numbered, strict=True):
            flat = nnx.to_flat_state(state)
            new = [
                (path, variable.replace(leaves[k]))
                for path, variable in flat
                if self.changed[k := jax.tree.leaves(variable)[0]]
            ]
            nnx.update(modules, nnx.from_flat_state(new))

    def _shared(self, args: Any) -> tuple[Any, tuple[Any, ...]]:
        """Shares variables in the copied arguments as in the original arguments.

        Returns the arguments and the variables that are not parameters.
        """
        leaves, treedef = flattened((nnx.Variable,), args)
        variables = _variables(leaves)
        # If a list of modules is split into chunks, the modules of a chunk share no variables.
        if len(variables) == len(self._first) > len(set(self._first)):
            variables = [variables[k] for k in self._first]
            left = iter(variables)
            leaves = [next(left) if isinstance(x, nnx.Variable) else x for x in leaves]
            args = trees.unflatten(treedef, leaves)
        return args, self._unique(variables)

    def _unique(self, variables: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the variables that are not parameters, without repetition."""
        return tuple({id(x): x for x in variables if not isinstance(x, nnx.Param)}.values())

    def _state(self, modules: Any) -> Any:
        return nnx.state(modules, nnx.Not(nnx.Param))

    def _kept(self, state: Any, which: int) -> Any:
        """Drops variables that a call added (intermediates); a carry must keep its structure."""
        flat = nnx.to_flat_state(state)
        return nnx.from_flat_state([(p, v) for p, v in flat if p in self._known[which]])


def _modules(x: Any) -> list[Any]:
    """Returns the nnx modules and variables in a function or a container, without repetition."""
    return held_in(x, (nnx.Pytree, nnx.Variable))


def _variables(leaves: Sequence[Any]) -> list[Any]:
    return [x for x in leaves if isinstance(x, nnx.Variable)]


def _with_copies(f: Any, copies: dict[int, Any]) -> Any:
    """Returns f with copies of the modules to which f refers.

    copies: Maps the id of each module to its copy.
    """
    entered = set[int]()

    def of(x: Any) -> Any:
        if id(x) in copies or id(x) in entered:  # a recursive function is visited once
            return copies.get(id(x), x)
        entered.add(id(x))
        new = with_parts(x, of)
        if isinstance(x, FunctionType) and not is_of_framework(x):
            cells, named = changed(cells_of(x)), changed(globals_of(x))
            defaults = of(x.__defaults__)
            if cells or named or defaults is not x.__defaults__:
                new = with_variables(x, cells, named, defaults)
        entered.discard(id(x))
        return new

    def changed(variables: dict[str, Any]) -> dict[str, Any]:
        return {name: new for name, x in variables.items() if (new := of(x)) is not x}

    return of(f)
