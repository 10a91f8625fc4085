"""Differentiates functions of modules with respect to the parameters of the modules.

    g = torch.autograd.grad(f(module), [p for p in module.parameters() if p.requires_grad])

f receives the user's module, not a copy. Classes, attributes, parameter hooks, external references
to parameters, and state changed by f therefore behave as in `loss.backward()`. The gradient is a
dictionary that maps the names of parameters to gradients. A module may be anywhere in a tree: in a
list, a dictionary or a dataclass. The graph of a result is built in the backward pass of the result
(see `lazy_graphs`).

Under vmap, under torch.func and in forward mode, a parameter is replaced by a batched or dual
tensor. In these cases f receives a structural copy of the module, as in `make_functional`. Code
that still reads the user's module (a closure, a hook, a bound method) reads the copy's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from gradtools.errors import DisconnectedInputError, GradtoolsError
from gradtools.integrations import refusal
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.captured_tensors import reading
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import is_dual, levels_differentiating
from gradtools.torch.lazy_graphs import current_graph, is_nested
from gradtools.torch.modules import REDUCING, Copy, ModuleTree, check_module, check_wrapper

Tensor = torch.Tensor
Parameters = dict[str, Tensor]


def opened(
    caller: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
) -> Opened | None:
    """Rewrites a call as a function of parameter dictionaries.

    Returns None if no differentiated argument contains a module. Raises an error in compiled code,
    where `torch.func` differentiates functions of tensors only.
    """
    for i in argnums:
        if is_compiling() and isinstance(args[i], nn.Module):
            raise GradtoolsError(
                f"{caller}: argument {i} is a module, {type(args[i]).__name__}, which compiled "
                "code cannot differentiate. Call gt.make_functional(module) outside, and "
                "differentiate apply with respect to params; or do not compile this derivative."
            )
        if not isinstance(args[i], Tensor) and not is_compiling() and _holds_module(args[i]):
            return Opened(caller, f, args, argnums)
    return None


def _holds_module(tree: Any) -> bool:
    """Returns whether a tree contains a module, without flattening common containers."""
    kind = type(tree)
    if kind is dict:
        return not trees.is_flat(tree) and any(map(_holds_module, tree.values()))
    if kind in (list, tuple):
        return any(map(_holds_module, tree))
    if tree is None or isinstance(tree, Tensor):
        return False
    return any(map(_is_module, _flattened(tree)[0]))


def _is_module(x: Any) -> bool:
    return isinstance(x, nn.Module)


def _flattened(tree: Any) -> tuple[list[Any], Any]:
    """Flattens a tree, treating modules as leaves."""
    if isinstance(tree, nn.Module):
        return trees.flatten(tree)
    return trees.WITH_MODULES.opened(*trees.WITH_MODULES.flatten(tree))


def part_of(tree: Any) -> Any:
    """Replaces each module in the tree with the dictionary of its differentiated parameters."""
    return with_parts(tree, lambda module: _differentiated(ModuleTree.of(module)))


def with_parts(tree: Any, part: Callable[[nn.Module], Any]) -> Any:
    """Replaces each module in the tree with `part(module)`."""
    if isinstance(tree, Tensor) or not _holds_module(tree):
        return tree
    leaves, treedef = _flattened(tree)
    return trees.unflatten(treedef, [part(x) if _is_module(x) else x for x in leaves])


def _differentiated(tree: ModuleTree) -> Parameters:
    """Returns the parameters that require grad, or have a tangent in an outer derivative."""
    of = _is_differentiated if is_nested() else attrgetter("requires_grad")
    return {name: p for name, p in tree.parameters.items() if of(p)}


def _is_differentiated(p: Tensor) -> bool:
    if p.requires_grad or (upstream.forward_level() < 0 and not upstream.is_wrapped(p)):
        return p.requires_grad
    with upstream.temporarily_clear_interpreter_stack():  # a level of functorch hides tangents
        return bool(levels_differentiating([p]))


class Opened:
    """A call with modules among its arguments, rewritten as a function of their parameters.

    Attributes:
        f: The user's function.
        args: The arguments, in which each differentiated module is replaced by a dictionary of its
            parameters.
        own: The ids of the modules' parameters, with respect to which the engine differentiates
            without aliases.
        opened_modules: The modules among the arguments.
    """

    opens_once = True
    reads_own = True  # f reads the module's own tensors, which `frozen` would treat as constants
    # f changes the user's modules directly, so there are no changes to return, write or reject.
    changed = ()
    effects: Callable[[], list[Tensor]] = staticmethod(list)
    settle = refuse_changes = staticmethod(lambda *extras: None)

    def __init__(
        self, caller: str, f: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]
    ) -> None:
        self.f, self._caller = f, caller
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self.__wrapped__ = f  # `in_axes` names f's parameters
        self._trees = {i: _flattened(args[i]) for i in argnums}
        self._parameters: dict[nn.Module, Parameters] = {}
        owners: dict[int, nn.Module] = {}
        for i, (leaves, _) in self._trees.items():
            held = [x for x in leaves if _is_module(x)]
            for module in held:
                if (error := refusal(caller, "a differentiated argument", module)) is not None:
                    raise error
                check_wrapper(caller, module, fixes=REDUCING)
                named = _differentiated(ModuleTree.of(module))
                for name, p in named.items():
                    if module in self._parameters or owners.setdefault(id(p), module) is not module:
                        raise GradtoolsError(
                            f"{caller}: the parameter {name} is in two of the differentiated "
                            "modules, so its gradient belongs to both. Pass one module that "
                            "contains both, such as an nn.ModuleList."
                        )
                self._parameters[module] = named
            if held and len(held) == len(leaves) and not any(self._parameters[m] for m in held):
                raise DisconnectedInputError(
                    f"{caller}: no parameter of argument {i}, {type(args[i]).__name__}, requires "
                    "grad. Call requires_grad_() on the module or the parameters to train."
                )
        self.opened_modules = list(self._parameters)
        self._graph = current_graph(f, self.opened_modules)
        every = [p for named in self._parameters.values() for p in named.values()]
        # In an outer derivative with respect to the module, the parameters are tensors of that
        # derivative.
        plain = not is_nested() or all(p.requires_grad and not is_dual(p) for p in every)
        self.own = frozenset(map(id, every)) if plain else frozenset()
        if self._graph is not None and plain:
            self._graph.leaves.update(zip(map(id, every), every, strict=True))
        parts = self._parameters.__getitem__
        self.args = [with_parts(x, parts) if i in argnums else x for i, x in enumerate(args)]

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context manager in which calls of f are not recorded in the lazy graph of the results."""
        graph, self._graph = self._graph, None
        try:
            yield
        finally:
            self._graph = graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls f with the user's modules, or with copies that contain the given parameters."""
        copies: list[Copy] = []
        replaced: list[tuple[Tensor, Tensor]] = []

        def whole(own: Any, part: Any) -> Any:
            if not _is_module(own):
                return part
            known = self._parameters[own]
            if self.own and all(map(is_, part.values(), known.values())):
                return own
            tree = check_module(self._caller, own)
            copies.append(Copy(tree, part, tree.buffers))
            replaced.extend((p, part[name]) for name, p in known.items() if p is not part[name])
            return copies[-1].root

        given, inner = list(args), set[int]()
        for i, (leaves, treedef) in self._trees.items():
            parts = treedef.flatten_up_to(args[i])
            inner |= {id(x) for x in parts}
            pairs = zip(leaves, parts, strict=True)
            given[i] = trees.unflatten(treedef, [whole(own, x) for own, x in pairs])
        try:
            with reading(replaced):
                output = self.f(*given, **kwargs)
        finally:
            for copy in copies:
                copy.hand_back()
        if self._graph is not None:
            self._graph.note(output, inner)
        return output

    def is_deferred(self) -> bool:
        """Returns whether the graph of the results is built later, in the backward pass."""
        return self._graph is not None and self._graph.deferred

    def attaching(self, caller: str, again: Callable[[], Any]) -> Callable[..., Any]:
        """Returns a function `attach(results, select)` that makes results differentiable.

        `select(again())` recomputes the results.
        """
        if self._graph is None:
            return lambda results, select=None: results
        return partial(self._graph.results, caller, again)
