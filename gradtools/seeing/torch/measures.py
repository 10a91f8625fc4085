"""`measure` in PyTorch: FLOPs and live bytes under a TorchDispatchMode, seconds without one.

f runs several times: under modes that count operations and live bytes, then with arguments that
require grad to count the bytes saved for backward, then without modes for timing. Each run starts
from the same state. Tensors are backed up copy-on-write, before the first in-place write. A
`Snapshot` restores the rest. Accesses that bypass the dispatcher (NumPy
views of a tensor's memory, ``p.data = ...``) are backed up when the access is handed out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradtools.function_variables import cells_of, globals_of
from gradtools.seeing import measures as costs
from gradtools.seeing.measures import Measurement
from gradtools.seeing.torch.flops import Flops
from gradtools.seeing.torch.operands import written
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import as_written, is_compiling
from gradtools.torch.live_bytes import LiveBytes, is_plain
from gradtools.torch.rerunning import Undo
from gradtools.torch.state import Snapshot

Tensor = torch.Tensor


def measure(f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Measurement:
    given = [x for x in upstream.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    costs.check_outside(is_compiling() or any(map(upstream.is_wrapped, given)))

    def run() -> Any:
        out = f(*args, **kwargs)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and (accelerator.type != "cuda" or torch.cuda.is_initialized()):
            torch.accelerator.synchronize()
        return out

    optimizers = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
    states = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    before = _Before(Snapshot.of([f, args, kwargs, *states], given))
    try:
        with LiveBytes() as live, PutBack(live, before), Flops() as flops, before, as_written():
            result = f(*args, **kwargs)
        del result
        before.restore()
        saved, notes = _saved(before, f, args, kwargs)
        device_peak = _device_peak(run)
        before.restore()
        times = costs.timed(run, before.restore)
    except BaseException:
        before.restore()
        raise
    if _is_compiled(f):
        notes.append("operations and bytes are those of eager execution underneath torch.compile")
    return costs.measurement(
        times,
        flops.unknown,
        notes,
        flops=flops.total,
        peak_bytes=live.peak,
        saved_bytes=saved,
        backend="torch",
        device_peak_bytes=device_peak,
    )


def _device_peak(run: Callable[[], Any]) -> int | None:
    """Warms up, and returns the peak of CUDA's allocator in that run."""
    if not torch.cuda.is_initialized():
        run()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- compiled code -----------------------------------------------------------------------


def _is_compiled(f: Any) -> bool:
    """Whether f is compiled code, or refers to some through closures and globals."""
    near = [f]
    for _ in range(4):
        if any(map(upstream.is_compiled, near)):
            return True
        named = [x for g in near for x in (*cells_of(g).values(), *globals_of(g).values())]
        near = [x for x in named if callable(x)]
    return False


# --- bytes -------------------------------------------------------------------------------


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """A context in which garbage collection skips all objects that existed before."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


@_only_new_garbage()
def _saved(
    before: _Before, f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int | None, list[str]]:
    """The bytes saved for backward, or None and a note if f cannot be differentiated."""
    live = LiveBytes()
    pack = lambda x: x.detach()  # saving x itself may create a reference cycle with its graph
    with torch.inference_mode(False), torch.enable_grad():
        tracked_args, tracked_kwargs = upstream.tree_map(_tracked, (tuple(args), kwargs))
        try:
            with live, PutBack(live, before), saved_tensors_hooks(pack, lambda x: x), as_written():
                result = f(*tracked_args, **tracked_kwargs)
        except Exception as error:  # f ran before, so differentiation is what fails
            before.restore()
            return costs.without_saved(error)
    before.restore()
    leaves = upstream.tree_leaves(result)
    graph = [x.grad_fn if isinstance(x, Tensor) else x for x in leaves]  # without the results
    del result, leaves
    gc.collect()
    with_graph = live.now
    del graph
    gc.collect()
    return with_graph - live.now, []


def _tracked(x: Any) -> Any:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


# --- restoring state ---------------------------------------------------------------------


class _Before(Undo):
    """The state that a run may change: random generators, f's captured state, written tensors."""

    def restore(self) -> None:
        self.put_back()
        self.start.restore()


class PutBack(upstream.Watching):
    """Backs up existing tensors copy-on-write, before an operation writes to them."""

    def __init__(self, live: LiveBytes, before: _Before) -> None:
        super().__init__()
        self._live, self._undo = live, before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in written(func, args, kwargs):
            if is_plain(x) and self._live.number_of(x) is None:
                self._undo.watch(x)
                self._undo.keep(x)
        return func(*args, **kwargs)
