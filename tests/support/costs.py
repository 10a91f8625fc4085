"""Counts operations and bytes of a call, for tests and benchmarks.

In PyTorch, `torch.utils.flop_counter` counts FLOPs of products, each element that any other
operation computes counts as one operation, and a dispatch mode measures live storages. In JAX, the
counts come from XLA's analysis of the compiled program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Cost(NamedTuple):
    """The number of operations and the peak of live bytes during a call."""

    flops: int
    peak_bytes: int


def cost(gt: Any, run: Callable[..., Any], *args: Any) -> Cost:
    """Return the cost of ``run(*args)`` in the framework of the namespace."""
    return (_in_torch if gt.__name__.endswith("torch") else _in_jax)(run, *args)


def _in_torch(run: Callable[..., Any], *args: Any) -> Cost:
    from tests.support.live_bytes import LiveBytes
    from tests.support.torch_counts import Work

    with LiveBytes() as live, Work() as work:
        run(*args)
    return Cost(work.flops, live.peak)


def _in_jax(run: Callable[..., Any], *args: Any) -> Cost:
    import jax

    compiled = jax.jit(run).lower(*args).compile()
    memory = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return Cost(int(compiled.cost_analysis().get("flops", 0)), peak)


def saved_bytes(gt: Any, f: Callable[..., Any], *args: Any) -> int:
    """Return the number of bytes that f saves for backward, except for its arguments."""
    return (_packed if gt.__name__.endswith("torch") else _handed)(f, *args)


def _packed(f: Callable[..., Any], *args: Any) -> int:
    """Count the bytes of the storages that f creates and saves for the backward pass."""
    import torch

    args = tuple(x.detach().clone().requires_grad_() for x in args)
    made, saved = set[int](), weakref.WeakSet[Any]()  # excludes tensors saved by freed graphs

    class Made(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            before = {memory(x) for x in torch.utils._pytree.tree_leaves((args, kwargs))}
            if func is torch.ops.aten.lift_fresh.default:  # torch.tensor, called by f
                before = set()
            made.update({memory(x) for x in torch.utils._pytree.tree_leaves(out)} - before - {0})
            return out

    def memory(x: Any) -> int:
        return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else 0

    class Saved:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.is_made = x, memory(x) in made
            saved.add(self)

    with Made(), torch.autograd.graph.saved_tensors_hooks(Saved, lambda s: s.x):
        y = f(*args)
    assert torch.utils._pytree.tree_leaves(y)[0].requires_grad
    kept = {memory(s.x): s.x.untyped_storage().nbytes() for s in saved if s.is_made}
    return sum(kept.values())


def _handed(f: Callable[..., Any], *args: Any) -> int:
    """Count the bytes of the residuals of the compiled `jax.vjp`, except for the arguments."""
    import jax

    forward = jax.jit(lambda *xs: jax.tree.leaves(jax.vjp(f, *xs)[1]))
    compiled = forward.lower(*args).compile()
    total = int(compiled.memory_analysis().output_size_in_bytes)
    found = [np.asarray(y) for y in compiled(*args)]
    table = 8 * len(found) if len(found) > 1 else 0  # XLA adds a table of pointers.
    here = {(x.shape, x.tobytes()) for x in map(np.asarray, args)}
    for y in found:
        key = y.shape, y.tobytes()
        if key in here:
            total -= y.nbytes
        here.add(key)
    return total - table
