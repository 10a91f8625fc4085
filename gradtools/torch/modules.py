"""A PyTorch module as a pure function of its parameters and buffers.

``torch.func.functional_call`` swaps tensors inside of the shared module, which is a data race
between threads. Here nothing is swapped: each call builds a structural copy (`Copy`), in which each
submodule has dictionaries of its own with the given parameters and clones of the given buffers.
Everything else is shared, hooks included. References of the tree to itself (tied tensors, shared
submodules, bound methods, lists of weights, plain objects that hold a submodule) are rebound to the
copy. ``make_functional`` makes such a copy once, from which its calls are copied in turn.

``torch.compile`` cannot trace the building of copies: there, ``functional_call`` is traced on
another private copy. ``gradtools.models`` documents the public name.
"""

from __future__ import annotations

import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from gradtools.arguments.in_axes import check_names
from gradtools.arguments.wording import type_in_words
from gradtools.errors import GradtoolsError, warn
from gradtools.function_variables import cells_of, parts_of, with_parts
from gradtools.integrations import integration
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.arrays import seed_of, split_key
from gradtools.torch.compiling import skipped_by_dynamo
from gradtools.torch.randomness import Randomness

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, torch.Size]
Applied = tuple[Any, dict[str, Tensor]]  # the output, and the new state
Apply = Callable[..., Applied]
Objects = dict[int, tuple[Any, Any, dict[str, Any]]]  # an object, its copy, and that one's fields

Relinked = dict[nn.Module, list[str]]

DEPTH = 4  # how deep lists and dictionaries are searched for references into the tree
SCALARS = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SLOTS = frozenset(upstream.SLOTS)
_INERT = frozenset((*SCALARS, torch.dtype, torch.device, torch.Size))
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set, frozenset))
_CONTAINERS_OF_EVERY_MODULE = frozenset(
    k for k, v in vars(nn.Module()).items() if type(v) in _CONTAINERS
)
SEEDING = threading.RLock()  # the global random streams are one resource of the process


@dataclass(frozen=True)
class ModuleTree:
    """The modules, parameters and buffers of a tree, each once under its first name.

    hidden: Modules that are wrapped by a transformed one (`chunked(module)`).
    """

    modules: dict[nn.Module, str]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    hidden: dict[nn.Module, None]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleTree:
        """The tree in one walk; by `named_modules` and so on if a class overrides these."""
        tree = cls({}, {}, {}, {})
        _walk(module, "", tree, set())
        if not all(map(_walks_as_usual, {*map(type, tree.modules)})):
            modules = {part: name for name, part in module.named_modules()}
            parameters: dict[str, Tensor] = {**dict(module.named_parameters())}
            tree = cls(modules, parameters, dict(module.named_buffers()), {})
        for part in tree.modules:
            while isinstance(part, upstream.ModuleLike):
                part = part._own
                if part not in tree.modules:
                    tree.hidden[part] = None
        return tree


def _walk(module: nn.Module, prefix: str, tree: ModuleTree, seen: set[int]) -> None:
    """As `module.named_modules()` and its kin, without a generator for each level."""
    modules = tree.modules
    modules[module] = prefix[:-1]
    parameters, buffers, children = upstream.slots_of(module)
    for name, x in parameters.items():
        if x is not None and id(x) not in seen:
            seen.add(id(x))
            tree.parameters[prefix + name] = x
    for name, x in buffers.items():
        if x is not None and id(x) not in seen:
            seen.add(id(x))
            tree.buffers[prefix + name] = x
    for name, child in children.items():
        if child is not None and child not in modules:
            _walk(child, f"{prefix}{name}.", tree, seen)


@lru_cache(256)
def _walks_as_usual(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _WALKS)


_WALKS = ("named_modules", "modules", "named_parameters", "named_buffers", "_named_members")


def make_functional(
    module: nn.Module,
    *,
    variables: Any = None,
    train: bool | None = None,
    rng_names: tuple[str, ...] = ("dropout",),
    frozen_too: bool = False,
) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """``(apply, params, state)`` of a module. See ``gradtools.models``.

    frozen_too: Whether params contains parameters that require no gradient, too.
    """
    keras = integration("keras")
    if keras is not None and keras.is_keras(module):
        backend = keras.KerasBackend("torch", Tensor.detach, Tensor.detach, _keras_seeds, _seeded)
        return keras.make_functional(module, variables, train, backend)
    tree = check_module("make_functional", module, variables)
    all_params = {name: p.detach() for name, p in tree.parameters.items()}
    free = {name for name, p in tree.parameters.items() if p.requires_grad or frozen_too}
    buffers = {name: b.detach().clone() for name, b in tree.buffers.items()}
    template = _Template.of(tree, all_params, buffers, train)
    private = template.copy(all_params, buffers).root  # for torch.compile alone
    params = {name: p for name, p in all_params.items() if name in free}
    frozen = {name: p for name, p in all_params.items() if name not in free}
    shapes = {name: p.shape for name, p in params.items()}
    state = {**frozen, **buffers}
    state_shapes = {name: x.shape for name, x in state.items()}

    return partial(apply, template, private, (shapes, state_shapes, tuple(frozen))), params, state


def apply(
    template: _Template,
    private: nn.Module,
    shapes: tuple[Shapes, Shapes, tuple[str, ...]],
    /,
    params: Tensors,
    state: Tensors,
    *args: Any,
    key: Any = None,
    **kwargs: Any,
) -> Applied:
    """The output of the module, and its new state."""
    _check_tensors("params", params, shapes[0])
    _check_tensors("state", state, shapes[1])
    if not torch.compiler.is_compiling():
        trees.flatten((args, kwargs))  # refuses JAX's arrays, which a module may pass through
    frozen = {name: state[name] for name in shapes[2]}
    buffers = {name: x for name, x in state.items() if name not in frozen} if frozen else state
    given = {**params, **frozen} if frozen else params
    if key is not None:
        out, after = _seeded_call(key, template, given, buffers, args, kwargs)
    elif torch.compiler.is_compiling():
        after = {name: buffer.clone() for name, buffer in buffers.items()}
        out = torch.func.functional_call(private, (dict(given), after), args, kwargs)
    else:
        out, after = _call(template, given, buffers, args, kwargs)
    return out, {**frozen, **after}


def _call(
    template: _Template, params: Tensors, state: Tensors, args: tuple, kwargs: dict
) -> Applied:
    if upstream.caches_weights():  # by id(module), which copies reuse
        raise GradtoolsError(
            "apply: inside torch.nn.utils.parametrize.cached() a copy could be given another "
            "copy's weights. Call apply outside of it."
        )
    copy = template.copy(params, {name: buffer.clone() for name, buffer in state.items()})
    out = copy.root(*args, **kwargs)
    return out, copy.buffers()


@skipped_by_dynamo
def _seeded_call(key: Any, template: _Template, *given: Any) -> Applied:
    with _seeded(key, given):
        return _call(template, *given)


@dataclass(frozen=True, eq=False, repr=False)
class _Template:
    """A copy of a module as it was when it was made functional, from which calls are copied."""

    tree: ModuleTree
    relinked: Relinked

    @classmethod
    def of(
        cls, tree: ModuleTree, params: Tensors, buffers: Tensors, train: bool | None
    ) -> _Template:
        """The template after ``module.train(train)``, which classes may override."""
        relinked = _relinked(tree)
        if train is None:
            made = ModuleTree.of(Copy(tree, params, buffers, relinked).root)
            modules = (*made.modules, *made.hidden)
            return cls(made, dict(zip(modules, relinked.values(), strict=True)))
        scratch = {name: p.clone() for name, p in params.items()}
        clones = {name: b.clone() for name, b in buffers.items()}
        root = Copy(tree, scratch, clones, relinked).root.train(train)
        for name, value in scratch.items():
            if not torch.allclose(value, params[name], rtol=0, atol=0, equal_nan=True):
                raise GradtoolsError(
                    f"make_functional: train={train} makes the module's train() change parameter "
                    f"{name!r}. Call module.train({train}) yourself and pass train=None."
                )
        return cls.of(ModuleTree.of(root), params, buffers, None)

    def copy(self, params: Tensors, buffers: Tensors) -> Copy:
        return Copy(self.tree, params, buffers, self.relinked)


# Reading the tree


def _relinked(tree: ModuleTree) -> Relinked:
    """The attributes of each module that refer into the tree; raises if one closes over it."""
    modules = (*tree.modules, *tree.hidden)
    places = {id(x): x for x in (*modules, *tree.parameters.values(), *tree.buffers.values())}
    known: dict[int, bool] = {}
    result: Relinked = {}
    for m in modules:
        live = {*_live(vars(m))} - {*_SLOTS, upstream.COMPILED_CALL}
        held = {k: v for k, v in vars(m).items() if k in live}
        _check_closures(m, held, places)
        result[m] = [k for k, v in held.items() if _refers(v, places, known=known)]
    return result


def _live(fields: dict[str, Any]) -> list[str]:
    """The attributes of a module that may reference other objects; most are plain values."""
    containers, values_of, others = _layout(tuple(fields))
    result = []
    for k in others:
        x, kind = fields[k], type(fields[k])
        if kind in _INERT:
            continue
        # An empty container, or one of plain values (a convolution's stride), holds none.
        if kind in _CONTAINERS and {*map(type, x)} <= _INERT and not (x and isinstance(x, dict)):
            continue
        result.append(k)
    result += compress(containers, values_of(fields))
    return result


@lru_cache(maxsize=512)
def _layout(names: tuple[str, ...]) -> tuple[list[str], Callable[..., tuple], list[str]]:
    """Of these fields the containers of every module, what reads them, and the others."""
    containers = [k for k in names if k in _CONTAINERS_OF_EVERY_MODULE]
    others = [k for k in names if k not in _CONTAINERS_OF_EVERY_MODULE]
    return containers, itemgetter(*containers, *containers[:1]), others


def _refers(
    value: Any, places: dict, depth: int = DEPTH, known: dict[int, bool] | None = None
) -> bool:
    """Whether a shared field refers to a tensor or module of the tree.

    known: The answers for plain objects, whose attributes are searched if it is given.
    """
    if id(value) in places:
        return True
    if not depth:
        return False
    fields = None if known is None else _attributes_of(value)
    if known is None or fields is None:
        return any(_refers(part, places, depth - 1, known) for part in parts_of(value))
    if id(value) not in known:  # of an object in an object nothing is relinked
        known[id(value)] = any(_refers(x, places, 1) for x in fields.values())
    return known[id(value)]


def _relink(value: Any, resolve: Callable, objects: Objects, depth: int = DEPTH) -> Any:
    """``value`` with every reference into the tree replaced by the copy's own.

    objects: The copies of plain objects, by the object's id.
    """
    own = resolve(value)
    if own is not None or depth == 0:
        return value if own is None else own
    fields = _attributes_of(value)
    if fields is None:
        return with_parts(
            value, partial(_relink, resolve=resolve, objects=objects, depth=depth - 1)
        )
    if id(value) not in objects:
        relinked = {
            k: x if _attributes_of(x) is not None else _relink(x, resolve, objects, 1)
            for k, x in fields.items()
        }
        if all(map(is_, relinked.values(), fields.values())):
            return value
        copy = object.__new__(type(value))
        vars(copy).update(relinked)
        objects[id(value)] = value, copy, relinked
    return objects[id(value)][1]


def _attributes_of(x: Any) -> dict[str, Any] | None:
    """The attributes of a user's plain object, which may hold modules or tensors of the tree."""
    kind: Any = type(x)
    if kind.__new__ is not object.__new__ or isinstance(x, nn.Module):
        return None
    if kind.__module__.partition(".")[0] in ("torch", "builtins", "gradtools"):
        return None
    return getattr(x, "__dict__", None)


def _check_closures(module: nn.Module, held: dict, places: dict) -> None:
    """Raises if a function among the attributes closes over the tree: it uses the originals."""
    kind = type(module).__name__
    own = {name: value for name, value in held.items() if name not in _OF_EVERY_MODULE}
    for name, value in own.items():
        if _closes_over(value, places):
            raise GradtoolsError(
                f"make_functional: attribute {name!r} of {kind} is or holds a function that closes "
                "over the module or its tensors, so it would not see the given parameters. Make it "
                "a method, or pass what it needs as an argument."
            )
    hooks = upstream.forward_hooks_of(module).values()
    if any(_closes_over(hook, places) for hook in hooks):
        warn(
            f"make_functional: a forward hook of {kind} closes over the module; it sees the "
            "original module's tensors. Use the hook's first argument instead."
        )


def _closes_over(value: Any, places: dict, depth: int = DEPTH) -> bool:
    """Whether a function, or one among the parts of a value, closes over the tree."""
    held = parts_of(value)
    if type(value) is types.FunctionType:
        held = [*cells_of(value).values(), *(value.__defaults__ or ())]
        if any(_refers(x, places, 1) for x in held):
            return True
    return depth > 0 and any(_closes_over(x, places, depth - 1) for x in held)


# Building a copy


class Copy:
    """A copy of a module for one call: other parameters, everything else shared.

    Args:
        tree: The module.
        params: The copy's parameters; those that are missing are shared.
        buffers: The copy's buffers.
        relinked: For a copy of which nothing reaches the original, as `_relinked` returns it.
            Otherwise modules without references are shared, and `hand_back` assigns what f
            assigned to the copy.

    Attributes:
        root: The copy.
    """

    def __init__(
        self, tree: ModuleTree, params: Tensors, buffers: Tensors, relinked: Relinked | None = None
    ) -> None:
        self._tree, self._buffers = tree, buffers
        given = {**tree.parameters, **params}
        own: dict[int, Any] = dict(zip(map(id, tree.parameters.values()), given.values()))  # noqa: B905, it costs
        own |= {id(b): buffers[name] for name, b in tree.buffers.items()}
        self._own, self._made = own, list[Any]()
        self._objects: Objects = {}
        known: dict[int, bool] = {}
        copies = []
        for m in (*tree.modules, *tree.hidden):
            live = [*upstream.SLOTS, *relinked[m]] if relinked is not None else _live(vars(m))
            # What f assigns to a module without a reference would be handed back anyway.
            own[id(m)] = copy = object.__new__(type(m)) if live else m
            if live:
                copies.append((m, copy, live))
        slots: dict[int, dict[str, Any]] = {}  # the same dictionary for modules that share theirs
        for m, copy, live in copies:
            fields, fixed = vars(m).copy(), live
            if fields.get(upstream.COMPILED_CALL) is not None:
                fields[upstream.COMPILED_CALL] = None
            if not _SLOTS.issuperset(live):
                held = {k: fields[k] for k in live if k not in _SLOTS}
                refers = [*held]
                if relinked is None:
                    _check_closures(m, held, own)
                    refers = [k for k, v in held.items() if _refers(v, own, known=known)]
                for name in refers:
                    fields[name] = _relink(held[name], lambda x: own.get(id(x)), self._objects)
                fixed = [k for k in live if k in _SLOTS or k in refers]
            for name in live:
                if name in _SLOTS:
                    slot = fields[name]
                    if id(slot) not in slots:
                        inside = {k: None if v is None else own[id(v)] for k, v in slot.items()}
                        slots[id(slot)] = inside
                    fields[name] = slots[id(slot)]
            object.__setattr__(copy, "__dict__", fields)
            # The attributes before the call, and those that are not to be handed back.
            self._made.append((m, copy, fields if relinked is not None else fields.copy(), fixed))
        self.root = own[id(next(iter(tree.modules)))]

    def buffers(self) -> dict[str, Tensor]:
        """The buffers after the call by their names, changed in place or reassigned."""
        result = dict(self._buffers)
        names = {id(b): name for name, b in self._tree.buffers.items()}
        for original, copy, _, _ in self._made:
            after = upstream.slots_of(copy)[1]
            for name, b in upstream.slots_of(original)[1].items():
                value = after.get(name)
                if b is not None and value is not None and value is not self._own[id(b)]:
                    result[names[id(b)]] = value
        return result

    def hand_back(self) -> None:
        """Assigns buffers and other attributes that f assigned to the copy to the module."""
        for plain, twin, relinked in self._objects.values():
            for name, value in vars(twin).items():
                if value is not relinked.get(name, relinked):
                    setattr(plain, name, value)
        for original, copy, before, fixed in self._made:
            fields = vars(copy)
            if upstream.SLOTS[1] in fixed:
                buffers = upstream.slots_of(original)[1]
                for name, value in [*upstream.slots_of(copy)[1].items()]:
                    buffer = buffers.get(name)
                    given = None if buffer is None else self._own.get(id(buffer), value)
                    if value is not given:
                        buffers[name] = value
            if len(fields) == len(before) and all(map(is_, fields.values(), before.values())):
                continue
            for name, value in fields.items():
                if name not in fixed and value is not before.get(name, before):
                    vars(original)[name] = value


# Checks


def check_module(caller: str, module: Any, variables: Any = None) -> ModuleTree:
    """The module's tree; raises for other objects, and for modules that cannot be copied."""
    if not isinstance(module, nn.Module):
        raise GradtoolsError(
            f"{caller}: got {type_in_words(module)}; the PyTorch backend accepts a torch.nn.Module."
        )
    if variables is not None:
        raise GradtoolsError(
            f"{caller}: a torch.nn.Module holds its own tensors; leave variables=None."
        )
    tree = ModuleTree.of(module)
    for part in {type(part): part for part in reversed(tree.modules)}.values():
        for base in type(part).__mro__:
            if base.__name__ in _FIXES and base.__module__.startswith("torch."):
                raise GradtoolsError(
                    f"{caller}: {tree.modules[part] or 'the module'} is a {base.__name__}, whose "
                    f"tensors cannot be given from outside; {_FIXES[base.__name__]}."
                )
    for tensors in (tree.parameters, tree.buffers):
        for name, x in tensors.items():
            if nn.parameter.is_lazy(x):
                part, _, own = name.rpartition(".")
                raise GradtoolsError(
                    f"{caller}: {own!r} of {part or 'the module'} has no shape yet (a lazy "
                    "module). Call the module once on an example first."
                )
    return tree


_FIXES = {
    "ScriptModule": "make_functional the Python module before scripting it",
    "DistributedDataParallel": "make_functional its .module",
    "FullyShardedDataParallel": "make_functional the module before it is wrapped",
    "FSDPModule": "call backward(), which reduces its gradients into .grad",
    "OptimizedModule": "make_functional its ._orig_mod and compile apply",
}


def _check_tensors(what: str, given: Any, shapes: Shapes) -> None:
    check_names(what, given, shapes, "name to tensor")
    for name, shape in shapes.items():
        x = given[name]
        if not isinstance(x, Tensor):
            raise GradtoolsError(f"apply: {what}[{name!r}] must be a tensor, got {x!r}.")
        if x.shape != shape and what == "params":
            raise GradtoolsError(
                f"apply: params[{name!r}] has shape {tuple(x.shape)}, the module's has "
                f"{tuple(shape)}. Give a tensor of that shape."
            )


# Random streams


@contextmanager
def _seeded(key: Any, tensors: Any) -> Iterator[None]:
    """Context in which the global generators of the tensors' devices and the CPU are seeded.

    It restores them; ``torch.manual_seed`` would also seed devices that are not restored here.
    """
    try:
        seed = seed_of(key)
    except RuntimeError as error:
        raise GradtoolsError(
            "apply: the key has no value here (it is mapped by vmap, or traced), and PyTorch's "
            "generators are seeded with numbers. Under vmap pass one key that is not mapped and "
            "randomness='different', or loop over the keys."
        ) from error
    devices = {x.device for x in upstream.tree_leaves(tensors) if isinstance(x, Tensor)}
    others = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
    with SEEDING:
        before = Randomness.of([torch.device("cpu"), *others])
        try:
            before.seeded(seed).restore()
            yield
        finally:
            before.restore()


def _keras_seeds(key: Any, count: int) -> list[Tensor]:
    """A pair of integers of 31 bits for each random stream of a Keras model."""
    return [k.abs() % (1 << 31) for k in split_key(key, count)] if count else []
