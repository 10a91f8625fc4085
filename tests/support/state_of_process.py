"""Takes snapshots of global state that a call could leave changed.

`quick()` runs before and after every test and takes a few microseconds; `everything()` runs before
and after every planted fault. Both return a dict of plain values with readable names, and `changes`
lists the differences. `bits` describes an array: memory, version, `.grad` and attached objects. The
functions read the state of Python, NumPy, the frameworks and gradtools.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy as np

numpy_state = np.random.get_state  # NumPy's global random state


def quick() -> dict[str, Any]:
    """Return the state that would affect later tests: levels, modes and defaults."""
    found: dict[str, Any] = {}
    if "torch" in sys.modules:
        found |= _levels_of_torch()
    if "jax" in sys.modules:
        found |= _levels_of_jax()
    return found


def everything() -> dict[str, Any]:
    """Return all known global state, including random states, flags and the environment."""
    found: dict[str, Any] = {**quick(), **_of_python()}
    if "torch" in sys.modules:
        found |= _rest_of_torch()
    if "jax" in sys.modules:
        found |= _rest_of_jax()
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Describe each difference: its name, the old value and the new value.

    Names that only `after` contains come from new imports and are ignored.
    """
    return [
        f"{name} was {_short(before[name])}, is {_short(after[name])}"
        for name in before
        if name in after and not _same(before[name], after[name])
    ]


def bits(x: Any) -> Any:
    """Describe the memory, the layout and the attached objects of an array with plain values."""
    if isinstance(x, np.ndarray):
        return (x.dtype.str, x.shape, x.strides, x.flags.writeable, x.tobytes())
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        return _bits_of_tensor(x)
    return (str(x.dtype), x.shape, np.asarray(x).tobytes(), x.is_deleted())


# --- PyTorch -----------------------------------------------------------------------------


def _levels_of_torch() -> dict[str, Any]:
    import torch
    from torch.autograd import forward_ad

    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    stack = torch._C._functorch.get_interpreter_stack()
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(compiler, "_stance", None)
    return {
        "the compiler's stance": getattr(stance, "stance", "default"),
        "the dispatch keys included": torch._C._dispatch_tls_local_include_set().raw_repr(),
        "the dispatch keys excluded": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "the nesting of vmap": level,
        "functorch's levels": len(stack or ()),
        "the level of forward mode": forward_ad._current_level,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }


def _rest_of_torch() -> dict[str, Any]:
    import torch

    from gradtools.torch import recomputation

    backends, cuda = torch.backends, torch.backends.cuda
    return {
        "PyTorch's random stream": torch.get_rng_state().numpy().tobytes(),
        "the default device": str(torch.empty(0).device),
        "autocast": [
            (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")
        ],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "attention's kernels": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            backends.mha.get_fastpath_enabled(),
        ),
        "cuDNN's and MKL-DNN's flags": (
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.cudnn.allow_tf32,
            backends.mkldnn.enabled,
        ),
        "autograd's threads": torch.autograd.is_multithreading_enabled(),
        "views in forward mode": torch._C._is_fwd_grad_enabled(),
        "hooks on all modules": _module_hooks(torch),
        "gradtools: recomputing": recomputation.is_recomputing(),
    }


def _module_hooks(torch: Any) -> list[int]:
    module = torch.nn.modules.module
    names = sorted(name for name in vars(module) if name.startswith("_global_"))
    kept = [getattr(module, name) for name in names]
    return [len(x) if hasattr(x, "__len__") else int(bool(x)) for x in kept]


def _bits_of_tensor(x: Any) -> Any:
    import torch

    hooks = len(x._backward_hooks or ()), len(getattr(x, "_post_accumulate_grad_hooks", None) or ())
    kind = (x.dtype, x.device, tuple(x.shape), x.requires_grad, x.is_conj(), x.is_neg(), *hooks)
    grad = None if not x.is_leaf or x.grad is None else (id(x.grad), _bits_of_tensor(x.grad))
    version = -1 if x.is_inference() else x._version
    if x.device.type == "meta":
        return (*kind, x.stride(), version, grad)
    with torch.no_grad():
        memory = x.detach().resolve_conj().resolve_neg().cpu().contiguous().clone()
    raw = bytes(memory.untyped_storage()) if memory.numel() else b""
    return (*kind, x.stride(), version, grad, raw)


# --- JAX ---------------------------------------------------------------------------------


def _levels_of_jax() -> dict[str, Any]:
    import jax

    return {"jax_enable_x64": jax.config.jax_enable_x64}


def _rest_of_jax() -> dict[str, Any]:
    import jax

    # no public function of JAX detects all kinds of active traces
    from jax._src.core import trace_state_clean

    flags = {
        f"jax.config.{name}": getattr(jax.config, name, None) for name in sorted(jax.config.values)
    }
    return {
        **flags,
        "no trace of JAX is active": trace_state_clean(),
    }


# --- Python and NumPy --------------------------------------------------------------------


def _of_python() -> dict[str, Any]:
    kind, keys, *rest = numpy_state()
    return {
        "python's random stream": random.getstate(),
        "NumPy's random stream": (kind, keys.tobytes(), *rest),
        "NumPy's errors": np.geterr(),
        "filters of warnings": [f for f in warnings.filters if _ours(f[2])],
        "the recursion limit": sys.getrecursionlimit(),
        "the tracing function": (sys.gettrace(), sys.getprofile()),
        "the handler of interrupts": signal.getsignal(signal.SIGINT),
        "the exception being handled": sys.exc_info()[0],
        "the working directory": os.getcwd(),
        "the environment": dict(os.environ),
        "threads": threading.active_count(),
    }


def _ours(category: type) -> bool:
    """Return whether the category of a warning filter belongs to Python or gradtools."""
    return category.__module__.partition(".")[0] in ("builtins", "gradtools")


def _same(a: Any, b: Any) -> bool:
    return bool(a is b or a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
