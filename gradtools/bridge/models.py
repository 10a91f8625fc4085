"""Converts models of one framework to the other.

A PyTorch module becomes `(apply, params, state)` of JAX arrays; a JAX model becomes an `nn.Module`
with its arrays as parameters and buffers. Both conversions bridge `make_functional` of the model's
framework, including its treatment of batch statistics and keys. Parameters and state are copies, so
that an optimizer of one framework does not write to arrays of the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

import gradtools.jax
import gradtools.torch
from gradtools.arguments.checks import check_names
from gradtools.bridge.functions import Bridged
from gradtools.bridge.memory import array_of
from gradtools.errors import GradtoolsError
from gradtools.jax.arrays import check_key
from gradtools.jax.module_arguments import module_kinds
from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
_NARROW = {torch.int64: torch.int32, torch.uint64: torch.uint32}


# --- a PyTorch module in JAX -------------------------------------------------------------


def module_to_jax(guest: Any, module: nn.Module, out: Any, train: bool | None) -> Any:
    """Converts a PyTorch module to `(apply, params, state)`."""
    run, params, state = gradtools.torch.make_functional(module, train=train)
    param_names, dtypes = [*params], {name: t.dtype for name, t in state.items()}

    def fun(params: Any, state: Any, *args: Any, key: Any = None, **kwargs: Any) -> Any:
        state = {name: t.detach().to(dtypes[name]) for name, t in state.items()}
        if key is not None:  # fake tensors, which only determine shapes, need no key
            key = None if upstream.detect_fake_mode([key]) else key.to(torch.int64)[:2]
        out, after = run(params, state, *args, key=key, **kwargs)
        return out, {name: _narrow(t) for name, t in after.items()}

    fun.__name__ = type(module).__name__
    bridged = Bridged(guest, fun, out)

    def apply(params: Any, state: Any, *args: Any, key: Any = None, **kwargs: Any) -> Any:
        """Returns the output and new state at the given parameters, buffers and arguments."""
        check_names("params", params, param_names)
        check_names("state", state, dtypes)
        if key is not None:
            check_key("apply", key)
            kwargs["key"] = jax.random.key_data(key)
        return bridged(params, state, *args, **kwargs)

    return apply, _arrays(module, params), _arrays(module, state)


def _narrow(t: Tensor) -> Tensor:
    """Narrows a 64-bit integer tensor, such as num_batches_tracked, if x64 is off."""
    wide = jax.config.read("jax_enable_x64")
    return t if wide else t.to(_NARROW.get(t.dtype, t.dtype))


def _arrays(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, jax.Array]:
    kind = type(module).__name__
    return {
        name: array_of(_narrow(t.detach()).clone(), f"to_jax: {name!r} of {kind}")
        for name, t in tensors.items()
    }


# --- a JAX model in PyTorch --------------------------------------------------------------


def is_jax_model(x: Any) -> bool:
    """Returns whether x is a model of an imported JAX library."""
    linen = sys.modules.get("flax.linen")
    kinds = module_kinds()
    kinds += (linen.Module,) if linen is not None else ()
    return isinstance(x, kinds)


def model_to_torch(guest: Any, model: Any, variables: Any, out: Any) -> nn.Module:
    """Converts a JAX model to an `nn.Module`."""
    if variables is None and not isinstance(model, module_kinds()):
        raise GradtoolsError(
            "to_torch: a flax.linen module does not contain its arrays; pass "
            "to_torch(module, variables=module.init(key, *args))."
        )
    run, params, state = gradtools.jax.make_functional(model, variables=variables)
    modes = {True: run, False: run}
    for train in modes:
        try:  # raises an error for a model without modes
            modes[train] = gradtools.jax.make_functional(model, variables=variables, train=train)[0]
        except GradtoolsError:
            break
    return BridgedModule(guest, type(model).__name__, modes, params, state, out)


class BridgedModule(nn.Module):
    """A JAX model as a PyTorch module; see `gradtools.bridge.to_torch`.

    The module's parameters are the model's floating arrays, and the buffers are the model's state;
    both have the model's names. `forward` takes the model's arguments and a `key`; in training a
    missing key is drawn from PyTorch's global generator.
    """

    def __init__(
        self, guest: Any, name: str, modes: dict[bool, Any], params: Any, state: Any, out: Any
    ) -> None:
        super().__init__()
        self._draws = False
        self._params, params_def = _registered(self, params, nn.Parameter)
        self._state, state_def = _registered(self, state, lambda t: t)
        impls = [_impl(x) for x in jax.tree.leaves(state)]

        def fun(run: Any, ps: Any, ss: Any, args: Any, key: Any, kwargs: Any) -> Any:
            ss = jax.lax.stop_gradient(ss)
            ss = [
                x if i is None else jax.random.wrap_key_data(x, impl=i)
                for x, i in zip(ss, impls, strict=True)
            ]
            key = None if key is None else jax.random.fold_in(jax.random.key(key[0]), key[1])
            out, after = run(
                jax.tree.unflatten(params_def, ps),
                jax.tree.unflatten(state_def, ss),
                *args,
                key=key,
                **kwargs,
            )
            return out, [_data(x) for x in jax.tree.leaves(after)]

        self._bridged = {}
        for train, run in modes.items():
            one: Any = partial(fun, run)
            one.__name__ = name
            self._bridged[train] = Bridged(guest, one, out)

    def forward(self, *args: Any, key: Tensor | None = None, **kwargs: Any) -> Any:
        """Returns the model's output. In training, the buffers are set to the new state."""
        ps, ss = (
            [attrgetter(name)(self) for name in names] for names in (self._params, self._state)
        )
        now = [x.clone() for x in ss] if self.training else ss  # autograd may save the buffers
        run = partial(self._bridged[self.training], ps, now, args)
        if key is None and self.training and self._draws:
            key = torch.randint(2**31 - 1, (2,))
        try:
            out, after = run(None if key is None else key.to(torch.int32), kwargs)
        except GradtoolsError:  # the model may need a key
            if key is not None or not self.training:
                raise
            out, after = run(torch.randint(2**31 - 1, (2,)).to(torch.int32), kwargs)
            self._draws = True
        if self.training:
            with torch.no_grad():
                for old, new in zip(ss, after, strict=True):
                    old.copy_(new)
        return out


def _impl(x: Any) -> str | None:
    """Returns the PRNG implementation of a typed key, or None for any other array."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return str(jax.random.key_impl(x)) if is_key else None


def _data(x: Any) -> Any:
    return x if _impl(x) is None else jax.random.key_data(x)


def _registered(
    module: nn.Module, tree: Any, made: Callable[[Tensor], Any]
) -> tuple[list[str], Any]:
    """Registers the arrays of a pytree in a module; returns their names and the treedef."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = []
    for path, x in leaves:
        path_name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        *above, last = path_name.split(".")
        if above and last == "value":  # omits the attribute of an nnx Variable from the name
            last = above.pop()
        inside = module
        for name in above:
            if name not in dict(inside.named_children()):
                inside.add_module(name, nn.Module())
            inside = inside.get_submodule(name)
        value = made(from_dlpack(_data(x)).clone())
        if isinstance(value, nn.Parameter):
            inside.register_parameter(last, value)
        else:
            inside.register_buffer(last, value)
        names.append(".".join([*above, last]))
    return names, treedef
