"""Differentiates functions of modules with respect to the floating arrays of the modules.

An `equinox` module is a pytree whose leaves may be functions, strings and integers; a `flax.nnx`
module is a graph with parts that are not parameters and may change during a call. A call of a
function of modules becomes a call of a function of pytrees of arrays:

    f(module, x)   =   g(part of the module, x),      module = part + rest

The part of an equinox module consists of its inexact arrays, as with `equinox.filter_grad`; the
part of an nnx module is the State of its `nnx.Param`s, as with `nnx.grad`. The updated state of an
nnx module is an extra output of g, and is written to the user's module after the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not
from typing import Any, cast

import jax

from gradtools.backend import Array
from gradtools.errors import GradtoolsError
from gradtools.integrations import integration
from gradtools.integrations.containers import Containers
from gradtools.jax import trees


def opened(
    caller: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
) -> Opened | None:
    """Rewrites a call as a function of pytrees of arrays.

    flax.nnx modules are replaced in all arguments, and equinox modules are replaced in
    differentiated arguments only. Returns None if the arguments contain no module to replace.
    """
    if not module_kinds():
        return None
    call = Opened(caller, f, args, kwargs, argnums)
    return call if call.has_modules else None


def part_of(tree: Any) -> Any:
    """Replaces each module in the tree with the pytree of its differentiated arrays."""
    kinds, nnx = module_kinds(), sys.modules.get("flax.nnx")
    if not kinds or not _modules(kinds, tree):
        return tree

    def part(x: Any) -> Any:
        if not isinstance(x, kinds):
            return x
        if nnx is not None and isinstance(x, nnx.Pytree):
            return nnx.state(x, nnx.Param)
        equinox = sys.modules["equinox"]
        return equinox.filter(x, equinox.is_inexact_array)

    return _mapped(kinds, part, tree)


def module_kinds() -> tuple[type, ...]:
    """Returns the module classes of the libraries that the program has imported."""
    equinox, nnx = sys.modules.get("equinox"), sys.modules.get("flax.nnx")
    if nnx is not None and not hasattr(nnx, "Pytree"):
        found = sys.modules["flax"].__version__
        raise GradtoolsError(f"gradtools supports flax>=0.11.2 and found flax {found}; upgrade it.")
    result = [equinox.Module] if equinox is not None else []
    return tuple([*result, nnx.Pytree] if nnx is not None else result)


def _modules(kinds: tuple[type, ...], tree: Any) -> list[Any]:
    if isinstance(tree, jax.Array):
        return []
    return [x for x in flattened(kinds, tree)[0] if isinstance(x, kinds)]


def flattened(kinds: tuple[type, ...], tree: Any) -> tuple[list[Any], Any]:
    """Flattens a tree, treating modules as leaves."""
    is_module = lambda x: isinstance(x, kinds)
    containers = Containers(
        "jax",
        partial(jax.tree.flatten, is_leaf=is_module),
        jax.tree.unflatten,
        trees.leaf_paths,
        lambda x: isinstance(x, (jax.Array, *kinds)),
        is_module,
    )
    return containers.opened(*containers.flatten(tree))


def _mapped(kinds: tuple[type, ...], f: Callable[[Any], Any], tree: Any) -> Any:
    """Applies f to each leaf of the tree, treating modules as leaves."""
    leaves, treedef = flattened(kinds, tree)
    return trees.unflatten(treedef, list(map(f, leaves)))


def like_module(f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """Returns `make(f)`, for example `chunked(f)`. If f is a module, the result is a module too.

    The arrays of an equinox or nnx module remain leaves of the resulting pytree or graph. The
    integration of a library is imported when the first module of the library is transformed.
    """
    for library in ("equinox", "flax.nnx"):
        loaded = sys.modules.get(library)
        if loaded is not None and isinstance(f, loaded.Module):
            return integration(library).Transformed(f, make)
    return make(f)


class Opened:
    """A call whose arguments contain modules, rewritten as a function of pytrees of arrays.

    All nnx modules of the call are split by a single `nnx.split`, so that shared variables remain
    shared.

    Attributes:
        args: The arguments, in which each differentiated module is replaced by the pytree of its
            differentiated arrays.
        changed: The paths of the flax.nnx variables that the latest call has changed.
        has_modules: Whether the arguments contain a flax.nnx module or a differentiated equinox
            module.
    """

    own: frozenset[int] = frozenset()  # needed in PyTorch only
    opens_once = False  # `Stateful` restores shared variables in the arguments of each chunk
    reads_own = False  # f reads copies of the modules, which contain tracers
    is_deferred = staticmethod(bool)  # always False: JAX traces all results

    def __init__(
        self,
        caller: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Sequence[int],
    ) -> None:
        self.caller, self._f = caller, f
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self.__wrapped__ = f  # `in_axes` names f's parameters
        self.changed: list[Any] = []
        self._forms: list[Any] = []
        self._effects: list[Array] = []
        self._kinds = module_kinds()
        moving = [args[i] for i in argnums]
        others = [x for i, x in enumerate(args) if i not in argnums]
        self._split_graphs(moving, [*others, *kwargs.values()])
        self.args = list(args)
        self._rests: dict[int, tuple[Any, list[Any]]] = {}
        for i in argnums:  # stores the treedef, and the constant part of each leaf
            leaves, treedef = flattened(self._kinds, args[i])
            if any(isinstance(x, self._kinds) for x in leaves):
                pairs = [self._split(x) for x in leaves]
                self.args[i] = trees.unflatten(treedef, [part for part, _ in pairs])
                self._rests[i] = treedef, [rest for _, rest in pairs]
        self.has_modules = bool(self._nodes or self._rests)

    def _split_graphs(self, active: Sequence[Any], others: Sequence[Any]) -> None:
        """Splits the nnx modules of all trees. Modules of the differentiated trees come first."""
        nnx = self._nnx = cast(Any, sys.modules.get("flax.nnx"))
        modules = [_modules((nnx.Pytree,), tree) if nnx else [] for tree in active]
        rest = [m for tree in others for m in (_modules((nnx.Pytree,), tree) if nnx else [])]
        first = {id(m): m for ms in modules for m in ms}
        nodes = first | {id(m): m for m in rest}
        self._nodes, self._params = tuple(nodes.values()), list[Any]()
        self._numbers = {key: k for k, key in enumerate(nodes)}
        if nnx is None or not nodes:
            return
        owners: dict[int, int] = {}
        for i, ms in enumerate(modules):
            for path, x in nnx.iter_graph(ms):
                if isinstance(x, nnx.Param) and owners.setdefault(id(x), i) != i:
                    raise GradtoolsError(
                        f"{self.caller}: the parameter {'.'.join(map(str, path[1:]))} is in two of "
                        "the differentiated arguments, so its gradient belongs to both. Pass "
                        "the modules in one argument, as a tuple or a dict."
                    )
        self._moving = lambda path, x: path[0] < len(first) and isinstance(x, nnx.Param)
        self._graph, params, self._rest = nnx.split(self._nodes, self._moving, ...)
        self._params = [params.get(k, nnx.State({})) for k in range(len(first))]
        self._known = dict(nnx.to_flat_state(self._rest))

    def _split(self, x: Any) -> tuple[Any, Any]:
        """Splits a module into differentiated arrays and a remainder (an index for nnx modules)."""
        if not isinstance(x, self._kinds):
            return x, None
        if id(x) in self._numbers:
            number = self._numbers[id(x)]
            return self._params[number], number
        equinox = sys.modules["equinox"]
        parts: tuple[Any, Any] = equinox.partition(x, equinox.is_inexact_array)
        return parts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies: Sequence[Any] = ()
        nnx, rests = self._nnx, self._rests
        if self._nodes:
            flat = {
                (rest, *path): x
                for i, (treedef, kept) in rests.items()
                for rest, part in zip(kept, treedef.flatten_up_to(args[i]), strict=True)
                if isinstance(rest, int)
                for path, x in nnx.to_flat_state(part)
            }
            params = nnx.from_flat_state(list(flat.items()))
            copies = nnx.merge(self._graph, params, self._rest, copy=True)
        whole = [self._whole(rests.get(i), x, copies) for i, x in enumerate(args)]
        named = {key: self._whole(None, x, copies) for key, x in kwargs.items()}
        out = self._f(*whole, **named)
        if not self._nodes:
            return out
        self.changed, self._forms, self._effects = [], [], []
        for path, now in nnx.to_flat_state(nnx.state(tuple(copies), nnx.Not(self._moving))):
            if path not in self._known:  # f added a variable, such as a flax Intermediate
                continue
            leaves, form = jax.tree.flatten(now)
            before = jax.tree.leaves(self._known[path])
            if len(leaves) != len(before) or any(map(is_not, leaves, before)):
                self.changed.append(path)
                self._forms.append(form)
                self._effects += leaves
        return out

    def _whole(self, rest: tuple[Any, list[Any]] | None, tree: Any, copies: Sequence[Any]) -> Any:
        """Rebuilds the modules of a differentiated tree, or replaces other modules with copies."""
        if rest is None:
            if not copies or not _modules(self._kinds, tree):
                return tree
            numbers = self._numbers
            copy = lambda x: copies[numbers[id(x)]] if id(x) in numbers else x
            return _mapped(self._kinds, copy, tree)
        treedef, rests = rest
        result = []
        for own, x in zip(rests, treedef.flatten_up_to(tree), strict=True):
            if isinstance(own, int):
                result.append(copies[own])
            else:
                result.append(x if own is None else sys.modules["equinox"].combine(x, own))
        return trees.unflatten(treedef, result)

    def effects(self) -> list[Array]:
        """Returns and clears the list of new arrays of variables that the latest call changed."""
        result, self._effects = self._effects, []
        return result

    def settle(self, extras: Sequence[Array]) -> None:
        """Writes the new arrays, which are the last extras of a call, to the user's modules."""
        if not self.changed:
            return
        left = iter(list(extras)[-sum(form.num_leaves for form in self._forms) :])
        new = [
            (path, jax.tree.unflatten(form, [next(left) for _ in range(form.num_leaves)]))
            for path, form in zip(self.changed, self._forms, strict=True)
        ]
        self._nnx.update(self._nodes, self._nnx.from_flat_state(new))

    def refuse_changes(self) -> None:
        """Raises an error if the latest call changed a module.

        Operators that cannot return changes call this method.
        """
        if self.changed:
            name = ".".join(map(str, self.changed[0][1:]))
            raise GradtoolsError(
                f"{self.caller}: f changes a module argument ({name}), which "
                f"{self.caller} cannot return here. Set evaluation mode "
                "(module.eval()), or use make_functional and return the state with has_aux=True."
            )
