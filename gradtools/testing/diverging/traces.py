"""A model's run with hooks on every layer: inputs, outputs and gradients.

In PyTorch, module hooks record each output and its gradient. In JAX a zero is added to each output,
and the gradient with respect to that zero is the gradient at the output. Calls are intercepted by
flax.linen's interceptors, and for flax.nnx and equinox by a wrapped ``__call__``.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.sides import as_setting, cast, library, tokens
from gradtools.testing.diverging.layouts import ParameterMapping
from gradtools.testing.diverging.parameters import read_jax, read_torch, split_name

CALLER = "first_divergence"
Name = tuple[str, ...]
_LOCK = threading.Lock()


@dataclass
class Layer:
    """One call of one module: arrays in NumPy.

    Attributes:
        name: The module's path; the model itself is ().
        call: The number of this call of the module.
        inputs: The arrays that it was called with.
        outputs: The floating arrays that it returned.
        gradients: The gradient at each output; None if there is none.
    """

    name: Name
    call: int
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    gradients: list[np.ndarray | None] = field(default_factory=list)

    def __str__(self) -> str:
        name = ".".join(self.name) or "the model"
        return f"{name} (call {self.call + 1})" if self.call else name


@dataclass
class Trace:
    """A recorded run.

    Attributes:
        layers: The calls, in the order in which they returned.
        parameters: The model's parameters by name or path.
        gradients: Their gradients.
    """

    layers: list[Layer]
    parameters: dict[Any, np.ndarray]
    gradients: dict[Any, np.ndarray]


def torch_trace(model: Any, inputs: Sequence[Any], kwargs: Any, dtype: str, draw: Any) -> Trace:
    """Records a run of a copy of a torch.nn.Module in `dtype`."""
    import torch

    from gradtools.torch._upstream import pytree

    model = copy.deepcopy(model).to(getattr(torch, dtype)).requires_grad_(True)
    model.zero_grad()
    args = [_given(x, dtype) for x in inputs]
    args = [torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in args]
    layers: list[Layer] = []
    calls: dict[Name, int] = {}

    def watch(name: Name) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
            call = calls[name] = calls.get(name, -1) + 1
            out = pytree.tree_map(tracked, out)
            outs = [y for y in _tensors(out) if y.is_floating_point() or y.is_complex()]
            ins = map(_np, _tensors([*args, *kwargs.values()]))
            layer = Layer(name, call, [*ins], [*map(_np, outs)], [None] * len(outs))
            layers.append(layer)
            for k, y in enumerate(outs):
                if y.requires_grad:
                    y.register_hook(lambda g, k=k: layer.gradients.__setitem__(k, _np(g)))
            return out

        return hook

    def tracked(y: Any) -> Any:
        """Gives outputs that depend on no parameter a gradient too, as in JAX."""
        free = hasattr(y, "requires_grad") and y.is_floating_point() and not y.requires_grad
        return y + torch.zeros_like(y, requires_grad=True) if free else y

    handles = [
        m.register_forward_hook(watch(split_name(n)), with_kwargs=True)
        for n, m in model.named_modules()
    ]
    try:
        out = [y for y in _tensors(model(*args, **(kwargs or {}))) if y.is_floating_point()]
        pairs = [(y, torch.as_tensor(draw(_np(y)))) for y in out]
        pairs = [(y, c) for y, c in pairs if y.requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [c for _, c in pairs])
    finally:
        for handle in handles:
            handle.remove()
    gradients = {n: _np(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return Trace(layers, read_torch(model), gradients)


def jax_trace(model: Any, inputs: Sequence[Any], kwargs: Any, dtype: str, draw: Any) -> Trace:
    """Records a run of a flax.linen module with variables, or of an nnx or equinox module.

    An equinox module takes one example, and `jax.vmap` of one a batch. Layers that the module
    itself maps over an axis are skipped, as their values are tracers of that transform.
    """
    import jax

    gt = import_module("gradtools.jax")
    asarray, is_array = jax.numpy.asarray, lambda x: isinstance(x, jax.Array)
    args = [_given(x, dtype) for x in inputs]
    args = [asarray(x) if isinstance(x, np.ndarray) else x for x in args]
    module, variables = model if isinstance(model, tuple) else (model, None)
    mapped = library(module) is None
    module = module.__wrapped__ if mapped else module
    apply, params, state = gt.make_functional(module, variables=variables)
    numbers = lambda x: asarray(cast(np.asarray(x), dtype)) if _is_inexact(x) else x
    params, state = jax.tree.map(numbers, (params, state))
    leaves, treedef = jax.tree.flatten(params)
    order: list[tuple[Name, int]] = []
    is_float = lambda x: is_array(x) and _is_inexact(x)
    floats = lambda tree: list(filter(is_float, jax.tree.leaves(tree)))

    def once(leaves: Any, zeros: dict[Any, Any], args: Sequence[Any]) -> tuple[Any, Any]:
        watched: list[tuple[Any, Any]] = []
        calls: dict[Name, int] = {}
        order.clear()

        def record(name: Name, args: Any, out: Any) -> Any:
            call = calls[name] = calls.get(name, -1) + 1
            if (name, call) in zeros:
                left = iter(zeros[name, call])
                out = jax.tree.map(lambda x: x + next(left) if is_float(x) else x, out)
            order.append((name, call))
            watched.append((list(filter(is_array, jax.tree.leaves(args))), floats(out)))
            return out

        with _hooks(module, record):
            out, _ = apply(jax.tree.unflatten(treedef, leaves), state, *args, **(kwargs or {}))
        return floats(out), watched

    def program(leaves: Any, zeros: dict[Any, Any]) -> tuple[Any, Any]:
        if not mapped:
            return once(leaves, zeros, args)
        return jax.vmap(lambda zeros, args: once(leaves, zeros, args))(zeros, args)

    def named(leaves: Any) -> dict[Any, np.ndarray]:
        tree = jax.tree.unflatten(treedef, leaves)
        return read_jax(tree if variables is None else {"params": tree})

    try:
        _, shapes = jax.eval_shape(program, leaves, {})
        zeros: dict[Any, Any] = {
            key: [jax.numpy.zeros(y.shape, y.dtype) for y in outs]
            for key, (_, outs) in zip(order, shapes, strict=True)
        }
        out, pullback, watched = gt.vjp(program, leaves, zeros, has_aux=True)
    except jax.errors.UnexpectedTracerError as error:
        raise GradtoolsError(
            f"{CALLER}: a layer of the JAX model is called inside a transform (nn.scan, nn.remat, "
            "nn.jit, nnx.scan), where its values cannot be looked at. Unroll it for the check."
        ) from error
    grads, back = pullback([asarray(draw(np.asarray(y))) for y in out])
    layers = [
        Layer(*key, [*map(_np, ins)], [*map(_np, outs)], [*map(_np, back[key])])
        for key, (ins, outs) in zip(order, watched, strict=True)
    ]
    return Trace(layers, named(leaves), named(grads))


@contextlib.contextmanager
def _hooks(module: Any, record: Callable[..., Any]) -> Iterator[None]:
    """A context in which each call of a layer of a JAX module returns what `record` returns.

    record: Takes the layer's name, its arguments and its result.
    """
    kind = library(module)
    if kind == "flax.linen":
        import flax.linen as nn

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out = call(*args, **kwargs)
            if context.method_name != "__call__":
                return out
            name = tuple(map(str, context.module.path))
            return record(name, [*args, *kwargs.values()], out)

        with nn.intercept_methods(intercept):
            yield
    elif kind == "flax.nnx":
        from flax import nnx

        # flax before 0.12.1 has it as a method alone
        every = getattr(nnx, "iter_modules", lambda module: module.iter_modules())
        named = lambda module: ((tuple(map(str, path)), part) for path, part in every(module))
        with _wrapped(named, module, record):
            yield
    else:
        from gradtools.jax._upstream import get_opaque_trace_state

        outside = get_opaque_trace_state(convention=CALLER)

        def record_outside(name: Name, args: Any, out: Any) -> Any:
            """Skips layers inside a transform of the module's own."""
            inside = get_opaque_trace_state(convention=CALLER) != outside
            return out if inside else record(name, args, out)

        with _wrapped(_equinox_modules, module, record_outside):
            yield


def _equinox_modules(module: Any, path: Name = ()) -> Iterator[tuple[Name, Any]]:
    """A module and its submodules, with their paths."""
    import equinox
    import jax

    yield path, module
    is_part = lambda x: x is not module and isinstance(x, equinox.Module)
    for keys, part in jax.tree.leaves_with_path(module, is_leaf=is_part):
        if is_part(part):
            below = tokens(jax.tree_util.keystr(keys))
            yield from _equinox_modules(part, (*path, *below))


@contextlib.contextmanager
def _wrapped(
    parts: Callable[[Any], Iterator[tuple[Name, Any]]], module: Any, record: Callable[..., Any]
) -> Iterator[None]:
    """A context in which `__call__` of the module's classes reports to `record`.

    A copy of the module is called, so its parts are named at its first call.
    """
    names: dict[int, Name] = {}
    kept, thread = {}, threading.get_ident()

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not names and threading.get_ident() == thread:
                names.update({id(part): name for name, part in parts(self)})
            out = call(self, *args, **kwargs)
            name = names.get(id(self))
            return out if name is None else record(name, [*args, *kwargs.values()], out)

        return run

    with _LOCK:
        for cls in {type(part) for _, part in parts(module)}:
            if any("__call__" in base.__dict__ for base in cls.__mro__):
                kept[cls] = cls.__dict__.get("__call__")
        originals = {cls: cls.__call__ for cls in kept}
        try:
            for cls, call in originals.items():
                cls.__call__ = watched(call)  # type: ignore[method-assign]
            yield
        finally:
            for cls, call in kept.items():
                if call is None:
                    del cls.__call__
                else:
                    cls.__call__ = call  # type: ignore[method-assign]


def check_arguments(torch_model: Any, jax_model: Any, inputs: Any, mapping: Any) -> None:
    """Raises for models and inputs that cannot be traced."""
    if not isinstance(inputs, tuple | list):
        raise GradtoolsError(
            f"{CALLER}: inputs must be a tuple with one entry for each argument of the models, got "
            f"a {type(inputs).__name__}. For one argument write inputs=(x,)."
        )
    for i, x in enumerate(inputs):
        as_setting(CALLER, x, f"input {i}")
    if not isinstance(mapping, ParameterMapping | None):
        raise GradtoolsError(
            f"{CALLER}: mapping is a {type(mapping).__name__}; expected None or what "
            "match_parameters made."
        )
    if library(torch_model) != "torch.nn":
        raise GradtoolsError(
            f"{CALLER}: torch_model is a {type(torch_model).__name__}; expected a torch.nn.Module."
        )
    pair = isinstance(jax_model, tuple) and len(jax_model) == 2
    known = pair and library(jax_model[0]) == "flax.linen"
    known = known or library(jax_model) in ("flax.nnx", "equinox")
    if not known and library(getattr(jax_model, "__wrapped__", None)) != "equinox":
        raise GradtoolsError(
            f"{CALLER}: jax_model is a {type(jax_model).__name__}; expected the pair (module, "
            "variables) of flax.linen, an nnx.Module, an equinox.Module or jax.vmap of one."
        )


# --- arrays and names


def _given(x: Any, dtype: str) -> Any:
    """A NumPy array among the inputs in this precision, copied; anything else as it is."""
    return cast(np.array(x), dtype) if isinstance(x, np.ndarray | np.generic) else x


def _np(x: Any) -> np.ndarray:
    return np.array(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


def _tensors(tree: Any) -> list[Any]:
    from gradtools.torch._upstream import pytree

    return [x for x in pytree.tree_leaves(tree) if hasattr(x, "requires_grad")]


def _is_inexact(x: Any) -> bool:
    import jax

    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
