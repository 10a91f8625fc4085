"""Saves and restores PyTorch's modes and flags that change results, for recomputations.

These are autocast, grad mode, the default device and dtype, and the flags that select kernels.
Reading all of them is fast; only those that differ are set.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.function_modes import NoForwardMode as NoForwardMode
from gradtools.torch.function_modes import PlainKernels, plain_kernels_are_on

Tensor = torch.Tensor


def batchings() -> int:
    """The number of open levels of autograd's legacy vmap, that of ``is_grads_batched``.

    Dynamo must not trace this: it would drop the increment, whose result is unused, and keep the
    decrement.
    """
    if torch.compiler.is_dynamo_compiling():
        return 0  # its backward is not traced under that vmap
    upstream.enter_vmap()
    return upstream.leave_vmap()


def by_new_vmap(fun: Callable[..., list[Any]], xs: Sequence[Any]) -> list[Any]:
    """`fun(*xs)` inside of ``is_grads_batched``, mapped by `torch.vmap` outside of it.

    Autograd records what a `torch.autograd.Function` returns on tensors of the legacy vmap, and
    loses that graph when the level ends. Results of `torch.vmap` keep their graphs.
    """
    level, there = batchings(), list[bool]()
    mapped = [x is not None and upstream.is_legacy_batched(x) for x in xs]
    if not level or not any(mapped):
        return fun(*xs)

    def run(*xs: Any) -> tuple[Any, ...]:
        results = fun(*xs)
        there[:] = [y is not None for y in results]
        return tuple([y for y in results if y is not None])

    upstream.leave_vmap()
    try:
        front = [
            upstream.remove_batch_axis(x, level, 1, 0) if m else x
            for x, m in zip(xs, mapped, strict=True)
        ]
        axes = tuple([0 if m else None for m in mapped])
        found = iter(torch.vmap(run, axes, 0, randomness="same")(*front))
        return [upstream.add_batch_axis(next(found), 0, level) if t else None for t in there]
    finally:
        upstream.enter_vmap()


_FORWARD_MODE = threading.Lock()


def dual_of(x: Tensor, tangent: Tensor) -> Tensor:
    """A dual tensor at the current level. Raises `NoForwardMode` for a DTensor."""
    try:
        return upstream.make_dual(x, tangent, level=upstream.forward_level())
    except NotImplementedError as error:
        raise NoForwardMode from error


class forward_mode:
    """A lock for forward mode, since PyTorch has a single level for all threads.

    Raises `NoForwardMode` instead of waiting, which could deadlock: the thread in the level may
    wait for this one. The derivative then is computed by reverse mode twice.
    """

    def __enter__(self) -> None:
        if not _FORWARD_MODE.acquire(blocking=False):
            raise NoForwardMode
        try:
            self._open()
        except BaseException:  # an interrupt, too, gives the level back
            _FORWARD_MODE.release()
            raise

    def _open(self) -> None:
        if upstream.forward_level() >= 0:
            raise NoForwardMode

    def __exit__(self, *error: Any) -> None:
        _FORWARD_MODE.release()


class dual_level(forward_mode):
    """`torch.autograd.forward_ad.dual_level`, or `NoForwardMode` if the level is in use.

    It enables tangents, which torch.func and a Function's jvp disable around code of their own.
    """

    def _open(self) -> None:
        super()._open()
        self._tangents = upstream.is_forward_mode_enabled()
        level = upstream.enter_forward_level()
        if level is None:  # another thread is about to enter or leave torch.func.jvp
            raise NoForwardMode
        self._level = level
        upstream.set_forward_mode_enabled(True)

    def __exit__(self, *error: Any) -> None:
        try:
            upstream.leave_forward_level(self._level)
        except BaseException:
            if upstream.forward_level() == self._level:  # an interrupt came before it
                upstream.leave_forward_level(self._level)
            raise
        finally:
            _FORWARD_MODE.release()
            upstream.set_forward_mode_enabled(self._tangents)


@contextmanager
def unpacked() -> Iterator[list[Any]]:
    """Removes saved-tensors hooks around an inner graph, and yields them, the innermost first.

    So no checkpoint counts the tensors of that graph. torch.func refuses to run inside of hooks.
    """
    hooks: list[Any] = []
    while (top := upstream.saved_tensors_hooks_on(False)) is not None:
        hooks.append(top)
        upstream.pop_saved_tensors_hooks()
    try:
        yield hooks
    finally:
        for pair in reversed(hooks):
            upstream.push_saved_tensors_hooks(*pair)


def has_checkpoint(hooks: Sequence[Any]) -> bool:
    """Whether some of the hooks are those of `torch.utils.checkpoint`."""
    return "torch.utils.checkpoint" in [getattr(pack, "__module__", "") for pack, _ in hooks]


NOTHING = nullcontext()


@contextmanager
def without_cached_weights() -> Iterator[dict[Any, Any]]:
    """Gives `parametrize.cached` an empty cache, since cached weights have another call's graph.

    Yields that cache.
    """
    outer, cache = upstream.cached_weights(), dict[Any, Any]()
    upstream.set_cached_weights(cache)
    try:
        yield cache
    finally:
        upstream.set_cached_weights(outer)


@dataclass(eq=False)
class Modes:
    """Autocast, grad mode, default device and flags in a function's first run."""

    flags: list[Any]  # in the order of `_FLAGS`
    autocast: list[tuple[str, bool, torch.dtype]]
    cached: bool
    grad: bool
    device: torch.device
    plain: bool  # whether `PlainKernels` is active

    @classmethod
    def now(cls, kinds: Iterable[str]) -> Modes:
        return cls(
            _current_flags(),
            _casts(kinds),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            default_device(),
            plain_kernels_are_on(),
        )

    def are_current(self) -> bool:
        """Whether they are the current ones, apart from grad mode."""
        return _current_flags() == self.flags and batchings() == 0 and not self._differing()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A block in the recorded modes and flags, outside of levels of ``is_grads_batched``."""
        depth, flags = batchings(), _current_flags()
        for _ in range(depth):
            upstream.leave_vmap()
        try:
            with ExitStack() as inside:
                for context in self._differing():
                    inside.enter_context(context)
                inside.enter_context(torch.set_grad_enabled(self.grad))
                _set(flags, self.flags)
                yield
        finally:
            _set(_current_flags(), flags)
            for _ in range(depth):
                upstream.enter_vmap()

    def _differing(self) -> list[AbstractContextManager[Any]]:
        """Contexts that set inference mode, default device and autocast where they differ."""
        result: list[AbstractContextManager[Any]] = []
        if torch.is_inference_mode_enabled():  # backward() may be called in inference mode
            result.append(torch.inference_mode(False))
        if default_device() != self.device:
            result.append(self.device)
        if self.plain and not plain_kernels_are_on():
            result.append(PlainKernels())
        casts_differ = _casts([kind for kind, _, _ in self.autocast]) != self.autocast
        if casts_differ:
            result += [
                torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self.cached)
                for kind, on, dtype in self.autocast
            ]
        return result


def casts_now(kinds: Iterable[str]) -> tuple[tuple[str, torch.dtype], ...]:
    """The device types for which autocast is on, and its dtypes."""
    casts = _casts(kinds) if upstream.is_any_autocast_enabled() else ()
    return tuple([(kind, dtype) for kind, on, dtype in casts if on])


@contextmanager
def without_casts(kinds: Iterable[str]) -> Iterator[None]:
    with ExitStack() as inside:
        for kind, _ in casts_now(kinds):
            inside.enter_context(torch.autocast(kind, enabled=False))
        yield


def default_device() -> torch.device:
    """`torch.get_default_device()`, which is slow, with a fast path if no device was set."""
    if upstream.device_set() is None and upstream.count_of_function_modes() == 0:
        return _CPU
    return upstream.default_device()


_CPU = torch.device("cpu")


def _casts(kinds: Iterable[str]) -> list[tuple[str, bool, torch.dtype]]:
    """The settings of autocast for the CPU and these device types."""
    kinds = sorted({"cpu", *kinds} - {"meta"})
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]


# --- flags that select kernels and precisions --------------------------------------------------

Flag = tuple[Callable[[], Any], Callable[[Any], Any]]
"""The getter and the setter of a flag."""


def _attribute(holder: Any, name: str) -> Flag:
    """The flag of a property, bypassing `torch.backends.disable_global_flags`.

    (`torch.testing._internal` calls that, after which assigning to the property raises.) A flag
    that the holder has by its `__getattr__` is read by that, without the lookup that fails before.
    """
    kind = type(holder)
    flag = vars(kind).get(name)
    if flag is None:
        return partial(kind.__getattr__, holder, name), partial(setattr, holder, name)
    return flag.getter, flag.setter


def _if_readable(get: Callable[[], Any], put: Callable[[Any], Any]) -> Flag:
    def read() -> Any:
        try:
            return get()
        except RuntimeError:  # "you have used a mix of the legacy and new APIs"
            return None

    return read, lambda value: None if value is None else put(value)


_cuda, _cudnn, _mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
_mha = torch.backends.mha

PRECISIONS: dict[str, Flag] = {
    "float32_matmul_precision": _if_readable(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "cudnn.allow_tf32": _if_readable(*_attribute(_cudnn, "allow_tf32")),
}
"""The flags that allow reduced precision in float32 products, in the order of setting.

Two legacy flags, for matrices and for cuDNN, write the newer ones (by library and operation), and
so come first. A legacy flag that contradicts the newer ones cannot be read, and is None.
"""
_NEWER = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
for _name in _NEWER if hasattr(_cudnn, "conv") else ():  # from PyTorch 2.9 on
    _at = operator.attrgetter(_name)(torch.backends), "fp32_precision"
    PRECISIONS[f"{_name}.fp32_precision"] = _attribute(*_at)

_FLAGS: dict[str, Flag] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    **PRECISIONS,
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
    ),
    "encoder fast path": (_mha.get_fastpath_enabled, _mha.set_fastpath_enabled),
    "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "lean attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "plain attention": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cudnn attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    **{
        f"cudnn.{name}": _attribute(_cudnn, name)
        for name in ("enabled", "benchmark", "deterministic")
    },
    "mkldnn.enabled": _attribute(_mkldnn, "enabled"),
}
"""All flags that change results, in the order of setting. Each pass of a frozen function reads
them."""
_GETTERS, _SETTERS = zip(*_FLAGS.values(), strict=True)


def _current_flags() -> list[Any]:
    """The flags, in the order of `_FLAGS`."""
    return [*map(operator.call, _GETTERS)]


def _set(now: list[Any], wanted: list[Any]) -> None:
    if now != wanted:
        for get, put, value in zip(_GETTERS, _SETTERS, wanted, strict=True):
            if get() != value:  # read anew, since a legacy flag that was set wrote newer ones
                put(value)
