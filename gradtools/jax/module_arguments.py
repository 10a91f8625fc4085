"""Modules as arguments: their floating arrays are differentiated, the rest is constant.

An `equinox` module is a pytree whose leaves may be functions, strings and integers; a `flax.nnx`
module is a graph, parts of which are no parameters and change during a call. A call of a function
of modules becomes a call of a function of pytrees of arrays:

    f(module, x)   =   g(part of the module, x),      module = part + rest

The part of an equinox module is its inexact arrays, as with `equinox.filter_grad`; that of an nnx
module is the State of its `nnx.Param`s, as with `nnx.grad`. The updated state of an nnx module is
an extra output of g, and is written to the user's module after the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not
from typing import Any

import jax

from gradtools.backend import Array
from gradtools.errors import GradtoolsError
from gradtools.integrations import integration
from gradtools.integrations.containers import Containers
from gradtools.jax import trees
from gradtools.jax.known_errors import flax_explained


def opened(
    caller: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
) -> Opened | None:
    """The call as a call on pytrees of arrays; None if no argument contains a module."""
    kinds = module_kinds()
    if not kinds:
        return None
    given: dict[Any, Any] = dict(enumerate(args))
    given |= kwargs
    result = {key: _modules(kinds, tree) for key, tree in given.items()}
    nnx = sys.modules.get("flax.nnx")
    graphs = nnx is not None and any(
        isinstance(m, nnx.Pytree) for ms in result.values() for m in ms
    )
    if not graphs and not any(result[i] for i in argnums):
        return None
    return Opened(caller, f, args, kwargs, argnums)


def part_of(tree: Any) -> Any:
    """The tree with each module replaced by its differentiated part."""
    kinds = module_kinds()
    if not kinds or not _modules(kinds, tree):
        return tree
    return _mapped(kinds, lambda x: _part(x) if isinstance(x, kinds) else x, tree)


def _part(module: Any) -> Any:
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(module, nnx.Pytree):
        return nnx.state(module, nnx.Param)
    equinox = sys.modules["equinox"]
    return equinox.filter(module, equinox.is_inexact_array)


def is_module(x: Any) -> bool:
    """Whether x is a module of a library that the program has imported."""
    return isinstance(x, module_kinds())


def module_kinds() -> tuple[type, ...]:
    """The module classes of the libraries that the program has imported."""
    equinox, nnx = sys.modules.get("equinox"), sys.modules.get("flax.nnx")
    if nnx is not None and not hasattr(nnx, "Pytree"):
        found = sys.modules["flax"].__version__
        raise GradtoolsError(f"gradtools supports flax>=0.11.2 and found flax {found}; upgrade it.")
    result = [equinox.Module] if equinox is not None else []
    return tuple([*result, nnx.Pytree] if nnx is not None else result)


def _modules(kinds: tuple[type, ...], tree: Any) -> list[Any]:
    if isinstance(tree, jax.Array):
        return []
    return [x for x in _flattened(kinds, tree)[0] if isinstance(x, kinds)]


def _flattened(kinds: tuple[type, ...], tree: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure, where a module is a leaf."""
    is_module = lambda x: isinstance(x, kinds)
    containers = Containers(
        partial(jax.tree.flatten, is_leaf=is_module),
        jax.tree.unflatten,
        trees.leaf_paths,
        lambda x: isinstance(x, (jax.Array, *kinds)),
        is_module,
    )
    return containers.opened(*containers.flatten(tree))


def _mapped(kinds: tuple[type, ...], f: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with f applied to each leaf, where a module is a leaf."""
    leaves, treedef = _flattened(kinds, tree)
    return trees.unflatten(treedef, list(map(f, leaves)))


def like_module(f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """`make(f)`, such as `chunked(f)`; a module again if f is one of equinox or flax.nnx.

    So its arrays are still leaves of the pytree or graph. The library's integration is imported
    when the first such module is transformed.
    """
    for library in ("equinox", "flax.nnx"):
        loaded = sys.modules.get(library)
        if loaded is not None and isinstance(f, loaded.Module):
            return integration(library).Transformed(f, make)
    return make(f)


class Opened:
    """A call whose arguments contain modules, as a function of pytrees of arrays.

    Attributes:
        args: The arguments, with each differentiated module replaced by its part.
        changed: The paths of the variables of flax.nnx modules that the latest call changed.
    """

    deferred = False  # results are attached by JAX's own traces

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
        self.changed: list[Any] = []
        self._kinds = module_kinds()
        self._effects: list[Array] = []
        self._forms: list[Any] = []
        moving = [args[i] for i in argnums]
        others = [x for i, x in enumerate(args) if i not in argnums]
        self._graphs = _Graphs.of(caller, moving, [*others, *kwargs.values()])
        self._rests: dict[int, tuple[Any, list[Any]]] = {}
        for i in argnums:  # the structure around the modules, and of each leaf what is kept apart
            leaves, treedef = _flattened(self._kinds, args[i])
            self._rests[i] = treedef, [self._rest(x) for x in leaves]
        self.args = [self._parted(x) if i in argnums else x for i, x in enumerate(args)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self._graphs
        rests = self._rests
        if graphs is None:
            whole = [self._whole(rests.get(i), x, {}) for i, x in enumerate(args)]
            return self._f(*whole, **kwargs)
        states = {
            own: x
            for i, (treedef, kept) in rests.items()
            for own, x in zip(kept, treedef.flatten_up_to(args[i]), strict=True)
            if isinstance(own, int)
        }
        copies = graphs.merged(states)
        whole = [self._whole(rests.get(i), x, copies) for i, x in enumerate(args)]
        named = {key: self._whole(None, x, copies) for key, x in kwargs.items()}
        with flax_explained(self.caller):
            out = self._f(*whole, **named)
        self.changed, self._forms, self._effects = graphs.changes(copies)
        return out

    def effects(self) -> list[Array]:
        """The arrays that the latest call changed; returned once, for they belong to its trace."""
        result, self._effects = self._effects, []
        return result

    def settle(self, extras: Sequence[Array]) -> None:
        """Writes the effects, the last of a call's extras, to the user's modules."""
        if self.changed and self._graphs is not None:
            count = sum(form.num_leaves for form in self._forms)
            with flax_explained(self.caller):
                self._graphs.write(self.changed, self._forms, list(extras)[-count:])

    def refuse_changes(self) -> None:
        """Raises if the latest call changed a module, which this operator cannot return."""
        if self.changed:
            names = [".".join(map(str, path[1:])) for path in self.changed]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise GradtoolsError(
                f"{self.caller}: f changes a module that it is given ({names[0]}{more}), which "
                f"{self.caller} does not hand on here. Set the module to evaluation "
                "(module.eval()), or use make_functional, and the state with has_aux=True."
            )

    @property
    def opens_once(self) -> bool:
        """Whether chunks get parts of one opening: a parameter may stand at several places."""
        return self._graphs is not None and self._graphs.is_tied

    # --- parts and wholes

    def _parted(self, tree: Any) -> Any:
        graphs = self._graphs

        def part(x: Any) -> Any:
            if not isinstance(x, self._kinds):
                return x
            return graphs.params[graphs.number(x)] if graphs and graphs.has(x) else _part(x)

        return _mapped(self._kinds, part, tree)

    def _rest(self, x: Any) -> Any:
        """An nnx module's number, an equinox module without its part; None for what is neither."""
        if not isinstance(x, self._kinds):
            return None
        if self._graphs is not None and self._graphs.has(x):
            return self._graphs.number(x)
        equinox = sys.modules["equinox"]
        return equinox.filter(x, equinox.is_inexact_array, inverse=True)

    def _whole(self, rest: tuple[Any, list[Any]] | None, tree: Any, copies: dict[int, Any]) -> Any:
        """A differentiated tree with its modules made whole; any other with copies of modules."""
        graphs = self._graphs
        if rest is None:
            if graphs is None or not _modules(self._kinds, tree):
                return tree
            copy = lambda x: copies[graphs.number(x)] if graphs.has(x) else x
            return _mapped(self._kinds, copy, tree)
        treedef, rests = rest
        result = []
        for own, x in zip(rests, treedef.flatten_up_to(tree), strict=True):
            if isinstance(own, int):
                result.append(copies[own])
            else:
                result.append(x if own is None else sys.modules["equinox"].combine(x, own))
        return trees.unflatten(treedef, result)


class _Graphs:
    """The nnx modules of a call, split together, so that shared variables stay shared.

    Attributes:
        params: The State of the parameters of each differentiated module, by its number.
    """

    @classmethod
    def of(cls, caller: str, active: Sequence[Any], others: Sequence[Any]) -> _Graphs | None:
        """The modules of the differentiated trees, then of the others; None without modules."""
        nnx = sys.modules.get("flax.nnx")
        if nnx is None:
            return None
        modules = [_modules((nnx.Pytree,), tree) for tree in active]
        rest = [m for tree in others for m in _modules((nnx.Pytree,), tree)]
        return cls(caller, nnx, modules, rest) if any(modules) or rest else None

    def __init__(self, caller: str, nnx: Any, active: list[list[Any]], others: list[Any]) -> None:
        self.nnx = nnx
        owners: dict[int, int] = {}
        for i, modules in enumerate(active):
            for path, x in nnx.iter_graph(modules):
                if isinstance(x, nnx.Param) and owners.setdefault(id(x), i) != i:
                    raise GradtoolsError(
                        f"{caller}: the parameter {'.'.join(map(str, path[1:]))} is in two of "
                        "the differentiated arguments, so that its gradient belongs to both. Pass "
                        "the modules in one argument, as a tuple or a dict."
                    )
        first = list({id(m): m for ms in active for m in ms}.values())
        self._nodes = tuple({id(m): m for m in [*first, *others]}.values())
        self._numbers = {id(m): k for k, m in enumerate(self._nodes)}
        count = len(first)
        self._moving = lambda path, x: path[0] < count and isinstance(x, nnx.Param)
        self._graph, params, self._rest = nnx.split(self._nodes, self._moving, ...)
        self.params = [params.get(k, nnx.State({})) for k in range(count)]
        self._known = dict(nnx.to_flat_state(self._rest))

    @property
    def is_tied(self) -> bool:
        """Whether a differentiated module holds one parameter at several places."""
        moving = jax.tree.leaves([self._nodes[k] for k in range(len(self.params))])
        return len({id(x) for x in moving}) < len(moving)

    def has(self, x: Any) -> bool:
        return id(x) in self._numbers

    def number(self, x: Any) -> int:
        return self._numbers[id(x)]

    def merged(self, states: dict[int, Any]) -> dict[int, Any]:
        """Copies of all modules; the differentiated ones get these parameters."""
        to_flat = self.nnx.to_flat_state
        flat = [((k, *path), x) for k, state in states.items() for path, x in to_flat(state)]
        params = self.nnx.from_flat_state(flat)
        return dict(enumerate(self.nnx.merge(self._graph, params, self._rest, copy=True)))

    def changes(self, copies: dict[int, Any]) -> tuple[list[Any], list[Any], list[Array]]:
        """The paths, structures and leaves of the variables that a call changed in the copies.

        Variables that it added (intermediates) are dropped: the user's modules lack them.
        """
        nodes = tuple(copies[k] for k in range(len(self._nodes)))
        paths, forms, result = list[Any](), list[Any](), list[Array]()
        for path, now in self.nnx.to_flat_state(self.nnx.state(nodes, self.nnx.Not(self._moving))):
            if path not in self._known:
                continue
            leaves, form = jax.tree.flatten(now)
            before = jax.tree.leaves(self._known[path])
            if len(leaves) != len(before) or any(map(is_not, leaves, before)):
                paths.append(path)
                forms.append(form)
                result += leaves
        return paths, forms, result

    def write(self, paths: list[Any], forms: list[Any], leaves: list[Array]) -> None:
        left = iter(leaves)
        new = [
            (path, jax.tree.unflatten(form, [next(left) for _ in range(form.num_leaves)]))
            for path, form in zip(paths, forms, strict=True)
        ]
        self.nnx.update(self._nodes, self.nnx.from_flat_state(new))
