"""Converts a PyTorch module to a pure function of its parameters and buffers.

``torch.func.functional_call`` replaces tensors inside of the shared module, which is a data race if
several threads call it. Here each call builds a structural copy (`Copy`) instead, whose submodules
have their own dictionaries with the given parameters and clones of the given buffers. All other
attributes of the module are shared, including hooks. References inside of the module to its own
tensors and submodules (tied tensors, shared submodules, bound methods, lists of weights, plain
objects) are replaced by references to the copy. If closures and other objects still refer to the
module's own tensors, a function mode replaces these tensors with the given tensors in all
operations. ``make_functional`` makes a first copy, and each call of ``apply`` copies the first
copy.

``torch.compile`` cannot trace the construction of copies; in compiled code, ``functional_call`` is
applied to another private copy instead. ``gradtools.models`` documents the public name.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from gradtools.arguments.checks import check_names, note_of_apply
from gradtools.arguments.wording import type_in_words
from gradtools.errors import GradtoolsError
from gradtools.function_variables import with_parts
from gradtools.integrations import integration
from gradtools.rules import captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.arrays import seed_of, split_key
from gradtools.torch.captured_tensors import reading
from gradtools.torch.compiling import skipped_by_dynamo
from gradtools.torch.state import Randomness

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, torch.Size]
Applied = tuple[Any, dict[str, Tensor]]  # the output, and the new state
Apply = Callable[..., Applied]

DEPTH = 4  # depth to which lists and dictionaries are searched for references to the tree
_INERT = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size))
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set, frozenset))
SEEDING = threading.RLock()  # all threads share the global random streams


@dataclass(frozen=True)
class ModuleTree:
    """The modules, parameters and buffers of a module and its submodules, without repeats.

    hidden: The modules that are wrapped by transformed modules, such as `chunked(module)`.
    """

    modules: dict[nn.Module, str]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    hidden: dict[nn.Module, None]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleTree:
        """Collects modules, parameters and buffers in a single traversal of the module."""
        tree = cls({}, {}, {}, {})
        tree._walk(module, "", set())
        for part in tree.modules:
            while isinstance(part, upstream.ModuleLike):
                part = part._own
                if part not in tree.modules:
                    tree.hidden[part] = None
        return tree

    def _walk(self, module: nn.Module, prefix: str, seen: set[int]) -> None:
        self.modules[module] = prefix[:-1]
        parameters, buffers, children = upstream.slots_of(module)
        for named, found in ((parameters, self.parameters), (buffers, self.buffers)):
            for name, x in named.items():
                if x is not None and id(x) not in seen:
                    seen.add(id(x))
                    found[prefix + name] = x
        for name, child in children.items():
            if child is not None and child not in self.modules:
                self._walk(child, f"{prefix}{name}.", seen)


def make_functional(
    module: nn.Module,
    *,
    variables: Any = None,
    train: bool | None = None,
    rng_names: tuple[str, ...] = ("dropout",),
    frozen_too: bool = False,
) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """Splits a module into ``(apply, params, state)``. See ``gradtools.models``.

    frozen_too: Whether params also contains parameters that do not require grad.
    """
    keras = integration("keras")
    if keras is not None and keras.is_keras(module):
        backend = keras.KerasBackend("torch", Tensor.detach, Tensor.detach, _keras_seeds, _seeded)
        return keras.make_functional(module, variables, train, backend)
    tree = check_module("make_functional", module, variables)
    all_params = {name: p.detach() for name, p in tree.parameters.items()}
    free = {name for name, p in tree.parameters.items() if p.requires_grad or frozen_too}
    buffers = {name: b.detach().clone() for name, b in tree.buffers.items()}
    originals = {**tree.parameters, **tree.buffers}
    if train is not None:
        tree = _trained(tree, all_params, buffers, train)
    template = ModuleTree.of(Copy(tree, all_params, buffers).root)
    if not _refers_to(template, originals.values()):
        originals = {}
    references = Copy(template, all_params, buffers).references
    copied = partial(Copy, template, references=references)
    params = {name: p for name, p in all_params.items() if name in free}
    frozen = {name: p for name, p in all_params.items() if name not in free}
    shapes = {name: p.shape for name, p in params.items()}
    state = {**frozen, **buffers}
    state_shapes = {name: x.shape for name, x in state.items()}
    private = copied(all_params, buffers).root  # only torch.compile uses this copy
    names = shapes, state_shapes, tuple(frozen)
    return partial(apply, copied, private, names, originals), params, state


def _refers_to(template: ModuleTree, originals: Iterable[Tensor]) -> bool:
    """Returns whether a closure, hook or bound method of a copy refers to the module's tensors."""
    wanted = {*map(id, originals)}
    held = [vars(m)[name] for m in template.modules for name in _may_refer(vars(m))]
    return any(True for _ in captured_objects(held, lambda x: id(x) in wanted, Tensor))


def _trained(tree: ModuleTree, params: Tensors, buffers: Tensors, train: bool) -> ModuleTree:
    """Returns the tree of a copy on which ``train(train)`` was called.

    Classes may override ``train``.
    """
    scratch = {name: p.clone() for name, p in params.items()}
    clones = {name: b.clone() for name, b in buffers.items()}
    root = Copy(tree, scratch, clones).root.train(train)
    for name, value in scratch.items():
        if not torch.allclose(value, params[name], rtol=0, atol=0, equal_nan=True):
            raise GradtoolsError(
                f"make_functional: train={train} makes the module's train() change parameter "
                f"{name!r}. Call module.train({train}) yourself and pass train=None."
            )
    return ModuleTree.of(root)


def apply(
    copied: Callable[..., Copy],
    private: nn.Module,
    shapes: tuple[Shapes, Shapes, tuple[str, ...]],
    originals: Tensors,
    /,
    params: Tensors,
    state: Tensors,
    *args: Any,
    key: Any = None,
    **kwargs: Any,
) -> Applied:
    """Returns the output of the module and its new state."""
    _check_tensors("params", params, shapes[0])
    _check_tensors("state", state, shapes[1])
    if not torch.compiler.is_compiling():
        trees.flatten((args, kwargs))  # rejects JAX arrays, which a module might return unchanged
    frozen = {name: state[name] for name in shapes[2]}
    buffers = {name: x for name, x in state.items() if name not in frozen} if frozen else state
    given = {**params, **frozen} if frozen else params
    if key is not None:
        out, after = _seeded_call(key, copied, originals, given, buffers, args, kwargs)
    elif torch.compiler.is_compiling():
        after = {name: buffer.clone() for name, buffer in buffers.items()}
        out = torch.func.functional_call(private, (dict(given), after), args, kwargs)
    else:
        out, after = _call(copied, originals, given, buffers, args, kwargs)
    return out, {**frozen, **after}


def _call(
    copied: Callable[..., Copy],
    originals: Tensors,
    params: Tensors,
    state: Tensors,
    args: tuple,
    kwargs: dict,
) -> Applied:
    if upstream.caches_weights():  # the keys of the cache are ids, which later copies may reuse
        raise GradtoolsError(
            "apply: inside torch.nn.utils.parametrize.cached() a copy could get another "
            "copy's weights. Call apply outside of cached()."
        )
    own = {name: buffer.clone() for name, buffer in state.items()}
    copy, given = copied(params, own), {**params, **own}
    with reading([(x, given[name]) for name, x in originals.items()]):
        try:
            out = copy.root(*args, **kwargs)
        except TypeError as error:
            note_of_apply(error)
            raise
    return out, copy.buffers()


@skipped_by_dynamo
def _seeded_call(key: Any, copied: Callable[..., Copy], originals: Tensors, *given: Any) -> Applied:
    with _seeded(key, given):
        return _call(copied, originals, *given)


# Copies


class Copy:
    """A copy of a module for one call, with other parameters and buffers.

    Args:
        tree: The `ModuleTree` of the module.
        params: The parameters of the copy; missing parameters are shared with the original.
        buffers: The buffers of the copy.
        references: For each module, the names of the attributes that refer to the tree, or None if
            unknown.

    Attributes:
        root: The copy.
        references: For each module, the names of the attributes that refer to the tree.
    """

    def __init__(
        self,
        tree: ModuleTree,
        params: Tensors,
        buffers: Tensors,
        references: list[list[str]] | None = None,
    ) -> None:
        given = {**tree.parameters, **params}
        own: dict[int, Any] = {id(p): given[name] for name, p in tree.parameters.items()}
        own |= {id(b): buffers[name] for name, b in tree.buffers.items()}
        modules = (*tree.modules, *tree.hidden)
        own |= {id(m): object.__new__(type(m)) for m in modules}
        self._links, self._given = _Links(own), buffers
        self.references: list[list[str]] = []
        slots: dict[int, dict[str, Any]] = {}  # modules that share a dictionary share its copy
        for i, m in enumerate(modules):
            fields, refers = vars(m).copy(), list[str]()
            if fields.get(upstream.COMPILED_CALL) is not None:
                fields[upstream.COMPILED_CALL] = None
            for name in _may_refer(fields) if references is None else references[i]:
                fields[name], old = self._links.relinked(fields[name]), fields[name]
                if fields[name] is not old:
                    refers.append(name)
            for name in upstream.SLOTS:
                slot = fields[name]
                if id(slot) not in slots:
                    inside = {k: None if v is None else own[id(v)] for k, v in slot.items()}
                    slots[id(slot)] = inside
                    if name == upstream.SLOTS[1]:
                        self._links.note(slot, inside)
                fields[name] = slots[id(slot)]
            object.__setattr__(own[id(m)], "__dict__", fields)
            self._links.note(vars(m), fields)
            self.references.append(refers)
        self.root: nn.Module = own[id(modules[0])]

    def buffers(self) -> dict[str, Tensor]:
        """Returns a dictionary of the buffers after the call, which may contain new tensors."""
        after = ModuleTree.of(self.root).buffers
        return {name: after.get(name, b) for name, b in self._given.items()}

    def hand_back(self) -> None:
        """Assigns the buffers and attributes that f set on the copy to the original module."""
        for original, copy, before in self._links.copied:
            if len(copy) == len(before) and all(map(is_, copy.values(), before.values())):
                continue
            for name, value in copy.items():
                if value is not before.get(name, before):
                    original[name] = value


def _may_refer(fields: dict[str, Any]) -> list[str]:
    """Returns the names of the attributes in `fields` whose values may refer to other objects."""
    result = []
    for name, x in fields.items():
        kind = type(x)
        if kind in _INERT or name in upstream.SLOTS or (kind in _CONTAINERS and not x):
            continue
        result.append(name)
    return result


class _Links:
    """Replaces references to tensors and modules of a tree with references to the copy.

    Args:
        own: Maps the id of an object to the replacement of the object.

    Attributes:
        copied: For each copied object, three attribute dictionaries: of the object, of the copy
            now, and of the copy when it was created.
    """

    def __init__(self, own: dict[int, Any]) -> None:
        self._own, self._objects = own, dict[int, Any]()  # copies of plain objects by id
        self.copied: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []

    def note(self, original: dict[str, Any], copy: dict[str, Any]) -> None:
        self.copied.append((original, copy, copy.copy()))

    def relinked(self, x: Any, depth: int = DEPTH) -> Any:
        """Returns x with its references replaced, or x itself if x does not refer to the tree."""
        if type(x) in _INERT:
            return x
        known = self._own.get(id(x))
        if known is not None or not depth:
            return x if known is None else known
        fields = _attributes_of(x)
        if fields is None:
            return with_parts(x, lambda part: self.relinked(part, depth - 1))
        if depth > 1 and id(x) not in self._objects:
            self._objects[id(x)] = x
            new = {k: self.relinked(y, 1) for k, y in fields.items()}
            if not all(map(is_, new.values(), fields.values())):
                copy = self._objects[id(x)] = object.__new__(type(x))
                vars(copy).update(new)
                self.note(fields, vars(copy))
        return self._objects.get(id(x), x)


def _attributes_of(x: Any) -> dict[str, Any] | None:
    """Returns the attribute dictionary of a plain object of the user, or None for other objects."""
    kind: Any = type(x)
    if kind.__new__ is not object.__new__ or isinstance(x, nn.Module):
        return None
    if kind.__module__.partition(".")[0] in ("torch", "builtins", "gradtools"):
        return None
    return getattr(x, "__dict__", None)


# Checks


def check_module(caller: str, module: Any, variables: Any = None) -> ModuleTree:
    """Returns the `ModuleTree` of a module. Raises an error if the module cannot be copied."""
    if not isinstance(module, nn.Module):
        raise GradtoolsError(
            f"{caller}: got {type_in_words(module)}; the PyTorch backend accepts a torch.nn.Module."
        )
    if variables is not None:
        raise GradtoolsError(
            f"{caller}: a torch.nn.Module contains its own tensors; leave variables=None."
        )
    tree = ModuleTree.of(module)
    for part, name in tree.modules.items():
        check_wrapper(caller, part, name)
    for tensors in (tree.parameters, tree.buffers):
        for name, x in tensors.items():
            if nn.parameter.is_lazy(x):
                part, _, own = name.rpartition(".")
                raise GradtoolsError(
                    f"{caller}: {own!r} of {part or 'the module'} has no shape yet (a lazy "
                    "module). Call the module once on an example first."
                )
    return tree


def check_wrapper(
    caller: str, module: nn.Module, name: str = "", fixes: Mapping[str, str] | None = None
) -> None:
    """Raises an error if the module's class, such as a data-parallel wrapper, is in `fixes`."""
    fixes = {**_FIXES, **REDUCING} if fixes is None else fixes
    for base in type(module).__mro__:
        if base.__name__ in fixes and base.__module__.startswith("torch."):
            raise GradtoolsError(
                f"{caller}: {name or 'the module'} is a {base.__name__}, {fixes[base.__name__]}."
            )


_REDUCES = "which reduces gradients over ranks when they are accumulated into .grad; "
REDUCING = {
    "DistributedDataParallel": _REDUCES + "use its .module, and average the gradients over ranks",
    "FullyShardedDataParallel": _REDUCES + "call backward()",
    "FSDPModule": _REDUCES + "call backward()",
}
_FIXES = {
    "ScriptModule": "whose tensors cannot be passed in; use the Python module",
    "OptimizedModule": "whose tensors cannot be passed in; use its ._orig_mod",
}


def _check_tensors(what: str, given: Any, shapes: Shapes) -> None:
    check_names(what, given, shapes, "names to tensors")
    for name, shape in shapes.items():
        x = given[name]
        if not isinstance(x, Tensor):
            raise GradtoolsError(f"apply: {what}[{name!r}] must be a tensor, got {x!r}.")
        if x.shape != shape and what == "params":
            raise GradtoolsError(
                f"apply: params[{name!r}] has shape {tuple(x.shape)}, but the "
                f"module's parameter has shape {tuple(shape)}. Pass a tensor of the latter shape."
            )


# Random streams


@contextmanager
def _seeded(key: Any, tensors: Any) -> Iterator[None]:
    """Context manager that seeds the global generators of the tensors' devices and the CPU.

    The states of the generators are restored on exit. ``torch.manual_seed`` is not called, because
    it seeds all devices.
    """
    try:
        seed = seed_of(key)
    except RuntimeError as error:
        raise GradtoolsError(
            "apply: the key has no value here (it is mapped by vmap, or traced), and PyTorch's "
            "generators are seeded with numbers. Under vmap, pass one unmapped key and "
            "randomness='different', or loop over the keys."
        ) from error
    devices = {x.device for x in upstream.tree_leaves(tensors) if isinstance(x, Tensor)}
    others = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
    with SEEDING:
        before = Randomness.of(others)
        try:
            before.seeded(seed).restore()
            yield
        finally:
            before.restore()


def _keras_seeds(key: Any, count: int) -> list[Tensor]:
    """Returns a seed, a pair of 31-bit integers, for each random stream of a Keras model."""
    return [k.abs() % (1 << 31) for k in split_key(key, count)] if count else []
