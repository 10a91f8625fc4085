"""Calls functions and models of one framework from the other: `from gradtools import bridge`.

    y = to_jax(f)(x)      dy = jvp_f(x, dx)      x' = vjp_f(x, y')

A bridged function is differentiated by its own framework, with `gradtools.vjp` and `jvp`. The
derivatives are also bridged functions, so both modes can be mixed at any order. Importing this
package imports both frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtools.arguments.wording import type_in_words
from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.errors import needed as _needed

try:
    import torch

    from gradtools.bridge.functions import Bridged
    from gradtools.bridge.jax_guest import JaxGuest
    from gradtools.bridge.models import BridgedModule, is_jax_model, model_to_torch, module_to_jax
    from gradtools.bridge.torch_guest import TorchGuest
except ModuleNotFoundError as error:
    raise _needed(__name__, error) from None

__all__ = ["to_jax", "to_torch"]

_TORCH = TorchGuest()


@user_facing
def to_jax(f: Callable[..., Any], *, out: Any = None, train: bool | None = None) -> Any:
    """Converts a PyTorch function or module to a differentiable JAX function.

    The result supports any nesting of forward mode, reverse mode, jit, vmap, scan and checkpoint.
    Outside of jit, f is called directly on the memory of its arguments; in a traced program f runs
    as a host callback, and arrays are copied through host memory. f must be a pure function of its
    arguments, because each derivative calls it again; the arrays that it captures are constants.
    In-place writes to an argument do not change the JAX array.

    Args:
        f: A function from pytrees of tensors (floating, complex, integer, bool; also bfloat16) to
            pytrees of tensors, or a `torch.nn.Module`. Arguments that are not arrays are static
            and must be hashable. Numbers and NumPy arrays in f's result are constants.
        out: The specification of the result: a pytree of `ArraySpec(shape, dtype)`, or a function
            that returns such a pytree for f's arguments with arrays replaced by ArraySpecs. A
            traced program requires `out` if the result's shape cannot be inferred with fake
            tensors, for example because the shape depends on values. After a direct call with the
            same shapes and dtypes, the specification of that call's result replaces `out`. For a
            module, `out` specifies the pair `(output, state)`.
        train: Whether a module runs in train mode. If None, the module keeps its current mode.

    Returns:
        A function of JAX arrays. For a module, the triple `(apply, params, state)`, with
        `apply(params, state, *args, key=None, **kwargs) -> (output, new_state)`, as from
        `gradtools.torch.make_functional`: params and state are dicts of JAX arrays, copied from the
        module and keyed by its names; `key` is a JAX key. Without x64, 64-bit integers in the state
        become 32-bit integers.

    Raises:
        GradtoolsError: f is not a function. When the result is called: f draws from PyTorch's
            global generator; a result has a 64-bit dtype and x64 is off; in a traced program, the
            result's shapes cannot be inferred and `out` is None, or the shapes differ from `out`;
            f is differentiated and its result contains numbers or NumPy arrays but no tensor. Under
            jit, JAX raises its own error, which contains this error's text.

    Example:
        >>> import jax, jax.numpy as jnp, torch
        >>> from gradtools import bridge
        >>> f = bridge.to_jax(lambda x: torch.sin(x).sum())
        >>> x = jnp.zeros(2)
        >>> jax.jit(jax.grad(f))(x)
        Array([1., 1.], dtype=float32)
        >>> apply, params, state = bridge.to_jax(torch.nn.Linear(2, 1))
        >>> {name: p.shape for name, p in params.items()}
        {'weight': (1, 2), 'bias': (1,)}
    """
    _check("to_jax", f)
    if isinstance(f, torch.nn.Module):
        return module_to_jax(_TORCH, f, out, train)
    if train is not None:
        raise GradtoolsError("to_jax: f is a function; pass train= for a module only.")
    if isinstance(f, Bridged) and isinstance(f.guest, JaxGuest):
        return f.fun
    return Bridged(_TORCH, f, out)


@user_facing
def to_torch(
    f: Callable[..., Any], *, out: Any = None, variables: Any = None, jit: bool = True
) -> Any:
    """Converts a JAX function or model to a differentiable PyTorch function or module.

    The result supports any nesting of reverse mode, forward mode, `torch.func`, `torch.compile` and
    checkpoint. Outside of transforms, f is called directly on the memory of its arguments, and a
    call blocks until the results are ready. f and each of its derivatives are compiled once per
    shape and dtype.

    Args:
        f: A function from pytrees of arrays to pytrees of arrays, or a model: a `flax.nnx` or
            `equinox` module, or a `flax.linen` module with its `variables`.
            Arguments that are not tensors are static and must be hashable.
        out: The specification of the result: a pytree of `ArraySpec(shape, dtype)`, or a function
            that returns such a pytree for the arguments, with tensors replaced by ArraySpecs. `out`
            is required if jit=False and `jax.eval_shape` cannot infer the result's shape.
        variables: The variables of a `flax.linen` module, as in `gradtools.jax.make_functional`.
        jit: Whether f is compiled. Pass False if f depends on concrete values, as in a Python `if`.

    Returns:
        A function of tensors. For a model, an `nn.Module`: its parameters are copies of the model's
        floating arrays, with the model's names; its buffers are the model's state. `train()` and
        `eval()` select the model's mode if the model has two modes. In training the buffers are
        updated with the state, and a missing key is drawn from PyTorch's global generator.

    Raises:
        GradtoolsError: f is not a function. When the result is called: a tensor has a 64-bit dtype
            and x64 is off; f closes over a JAX tracer; a tensor is sparse.

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from gradtools import bridge
        >>> f = bridge.to_torch(lambda x: jnp.sin(x).sum())
        >>> x = torch.zeros(2, requires_grad=True)
        >>> f(x).backward()
        >>> x.grad
        tensor([1., 1.])
        >>> torch.func.hessian(f)(torch.zeros(1))
        tensor([[-0.]])
    """
    _check("to_torch", f)
    guest = JaxGuest(jit)
    if is_jax_model(f):
        return model_to_torch(guest, f, variables, out)
    if variables is not None:
        raise GradtoolsError("to_torch: f is a function; pass variables= for a model only.")
    if isinstance(f, Bridged) and isinstance(f.guest, TorchGuest):
        return f.fun
    return Bridged(guest, f, out)


def _check(caller: str, f: Any) -> None:
    is_torch, is_jax = isinstance(f, torch.nn.Module), is_jax_model(f)
    wrong_way = is_torch if caller == "to_torch" else is_jax and not is_torch
    if wrong_way or isinstance(f, BridgedModule) or not (callable(f) or is_jax):
        hint = ""
        if wrong_way and not isinstance(f, BridgedModule):
            way = "PyTorch to JAX, call to_jax" if is_torch else "JAX to PyTorch, call to_torch"
            hint = f" To convert {way}."
        elif isinstance(f, tuple) and f and is_jax_model(f[0]):
            hint = " For a flax.linen module call to_torch(module, variables=variables)."
        guest = "JAX" if caller == "to_torch" else "PyTorch"
        raise GradtoolsError(
            f"{caller}: got {type_in_words(f)}; expected a function or a model of {guest}.{hint}"
        )
