"""Modules as arguments: their parameters are differentiated, the rest is constant.

A `torch.nn.Module` is differentiated with respect to the dictionary of its parameters that require
grad. f gets a structural copy of the module with other parameters, like that of `make_functional`;
everything else is shared with the user's module: frozen parameters, buffers, hooks. Attributes that
f assigns are assigned to the user's module as well. A module may be anywhere in a tree: in a list,
a dictionary, a dataclass.

`chunked(module)` and the like return a module as well (see `Transformed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import deferred_graphs, trees
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import levels_differentiating

if TYPE_CHECKING:
    from gradtools.torch.modules import ModuleTree

Tensor = torch.Tensor
_EVALUATE_ONCE = ("grad", "value_and_grad", "minimax_value_and_grad")


def opened(
    caller: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
) -> Opened | None:
    """The call as a call on dictionaries of tensors; None if no module is differentiated.

    Raises in compiled code, which cannot build copies of modules.
    """
    for i in argnums:
        if is_compiling() and isinstance(args[i], nn.Module):
            raise GradtoolsError(
                f"{caller}: argument {i} is a module, {type(args[i]).__name__}, which compiled "
                "code cannot copy. Call gt.make_functional(module) outside, and differentiate "
                "apply to params; or leave this derivative out of what is compiled."
            )
        if not isinstance(args[i], Tensor) and not is_compiling() and _holds_module(args[i]):
            return Opened(caller, f, args, argnums)
    return None


def _holds_module(tree: Any) -> bool:
    """Whether a tree contains a module; common containers are walked without flattening."""
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


def part_of(
    tree: Any,
    alias: Callable[[Tensor], Tensor] = Tensor.detach,
    read: dict[nn.Module, ModuleTree] | None = None,
) -> Any:
    """The tree with each module replaced by the dictionary of its differentiated parameters."""
    from gradtools.torch.modules import ModuleTree

    def part(module: nn.Module) -> dict[str, Tensor]:
        named = (read[module] if read else ModuleTree.of(module)).parameters.items()
        return {name: alias(p) for name, p in named if _is_differentiated(p)}

    return with_parts(tree, part)


def _is_differentiated(p: Tensor) -> bool:
    """Whether p requires grad, or has a tangent in an outer derivative at its module."""
    if p.requires_grad or (upstream.forward_level() < 0 and not upstream.is_wrapped(p)):
        return p.requires_grad
    with upstream.temporarily_clear_interpreter_stack():  # levels of functorch hide tangents
        return bool(levels_differentiating([p]))


def with_parts(tree: Any, part: Callable[[nn.Module], Any]) -> Any:
    """The tree with each module replaced by `part(module)`."""
    if isinstance(tree, Tensor) or not _holds_module(tree):
        return tree
    leaves, treedef = _flattened(tree)
    return trees.unflatten(treedef, [part(x) if _is_module(x) else x for x in leaves])


def _flattened(tree: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure, where a module is a leaf."""
    return trees.WITH_MODULES.opened(*trees.WITH_MODULES.flatten(tree))


class Opened:
    """A call some of whose arguments contain modules, as a function of their parameters.

    Attributes:
        args: The arguments, with each differentiated module replaced by its parameters.
        deferred: Whether these are the parameters themselves, at which the engine evaluates f as
            if they required no gradient. Other operators get detached aliases of them.
    """

    opens_once = True
    changed = ()  # changes are written to the user's modules at once

    def __init__(
        self, caller: str, f: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]
    ) -> None:
        self._f = f
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self._trees = {i: _flattened(args[i]) for i in argnums}
        result = [x for leaves, _ in self._trees.values() for x in leaves if _is_module(x)]
        self._read = _checked(caller, result)
        self._graph = deferred_graphs.current()
        self.deferred = False
        if caller in _EVALUATE_ONCE and type(self._graph) is deferred_graphs.DeferredGraph:
            # The graph is deferred if all that is differentiated are parameters.
            ps = [p for tree in self._read.values() for p in tree.parameters.values()]
            ps = [p for p in ps if p.requires_grad]
            count = sum(len(leaves) for leaves, _ in self._trees.values())
            self.deferred = len(self._read) == count and {*map(type, ps)} <= {nn.Parameter}
            if self.deferred:
                self._graph.parameters = ps
        alias = (lambda p: p) if self.deferred or self._graph is None else self._graph.alias
        self.args = [
            part_of(x, alias, self._read) if i in self._trees else x for i, x in enumerate(args)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls f with copies of the modules that have these parameters."""
        from gradtools.torch.modules import Copy, ModuleTree

        copies: list[Copy] = []
        read, self._read = self._read, {}  # for the first call only: f may change a module

        def whole(own: Any, x: Any) -> Any:
            if not _is_module(own):
                return x
            tree = read.get(own) or ModuleTree.of(own)
            buffers = tree.buffers
            if self._graph is not None:
                buffers = self._graph.buffers(own, buffers)
            copies.append(Copy(tree, x, buffers))
            return copies[-1].root

        given = list(args)
        for i, (leaves, treedef) in self._trees.items():
            pairs = zip(leaves, treedef.flatten_up_to(args[i]), strict=True)
            given[i] = trees.unflatten(treedef, [whole(own, x) for own, x in pairs])
        try:
            output = self._f(*given, **kwargs)
        finally:
            for copy in copies:
                copy.hand_back()
        if self._graph is not None:
            self._graph.note(output)
        return output

    def attaching(self, caller: str, again: Callable[[], Any]) -> Callable[..., Any]:
        """A function `attach(results, select)` that makes results differentiable by parameters.

        `select(again())` recomputes the results.
        """
        if self._graph is None:
            return lambda results, select=None: results
        return partial(self._graph.attached, caller, again)

    def effects(self) -> list[Tensor]:
        """No arrays: changes are written to the user's modules at once."""
        return []

    def settle(self, extras: Sequence[Tensor]) -> None:
        """Does nothing: changes have been written already."""

    def refuse_changes(self) -> None:
        """Does nothing: no change is lost."""


def _checked(caller: str, modules: Sequence[nn.Module]) -> dict[nn.Module, ModuleTree]:
    """The module trees; raises for modules that cannot be copied, and for shared parameters."""
    from gradtools.integrations.keras import is_keras, refusal
    from gradtools.torch.modules import check_module

    owners: dict[int, int] = {}
    read: dict[nn.Module, ModuleTree] = {}
    for k, module in enumerate(modules):
        if is_keras(module):
            raise refusal(caller, "a differentiated argument", module)
        read[module] = check_module(caller, module)
        for name, p in read[module].parameters.items() if len(modules) > 1 else ():
            if p.requires_grad and owners.setdefault(id(p), k) != k:
                raise GradtoolsError(
                    f"{caller}: the parameter {name} is in two of the differentiated modules, "
                    "so that its gradient belongs to both. Pass one module that holds them, as "
                    "nn.ModuleDict or nn.ModuleList."
                )
    return read


# --- modules that operators return ---------------------------------------------------------

_SHARED = (*upstream.SLOTS, upstream.NOT_SAVED)


def like_module(f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """`make(f)`, as a module if f is one; a ScriptModule, which has no dictionaries, is not."""
    plain = isinstance(f, nn.Module) and all(name in f.__dict__ for name in _SHARED)
    return Transformed(f, make(f)) if plain else make(f)


class Transformed(upstream.ModuleLike):
    """A module with the state of another one, and its own call.

    As with `torch.nn.DataParallel`, transforming a module gives a module. Unlike there, parameters
    keep their names, so that a `state_dict` is the same with and without the transformation.
    Parameters, buffers and submodules are shared by using the module's own dictionaries, and
    methods that a module may override are delegated to it.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        shared = {name: module.__dict__[name] for name in _SHARED}
        name = getattr(call, "__name__", "").partition("_")[0]
        self.__dict__.update(shared, _own=module, _call=call, _name=name, __wrapped__=module)

    @user_facing
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The transformed call; global module hooks see only the user's modules."""
        hooked = upstream.has_hooks(self)
        return super().__call__(*args, **kwargs) if hooked else self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def training(self) -> bool:
        return self._own.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_own" in self.__dict__:
            self._own.training = mode

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_own")
        return super().__getattr__(name) if own is None else getattr(own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get("_own")
        is_patch = name == "forward" or (name[0] == "_" and not hasattr(own, name))
        if own is None or name in self.__dict__ or is_patch:
            super().__setattr__(name, value)
        else:
            setattr(own, name, value)

    def __repr__(self) -> str:
        return f"{self._name}({self._own!r})"

    # --- methods that a module may override

    def train(self, mode: bool = True) -> Transformed:
        self._own.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Transformed:  # type: ignore[override]
        self._own.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._own.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._own.load_state_dict(*args, **kwargs)
