"""Defines the PyTorch backend, an implementation of `gradtools.backend.Backend`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradtools.arguments.wording import in_words
from gradtools.backend import Array, FrameworkBackend, LazyMember
from gradtools.boundary import LinearFunction
from gradtools.errors import GradtoolsError, RuntimeRefusal, is_of
from gradtools.integrations.containers import is_same
from gradtools.torch import (
    arrays,
    engines,
    function_modes,
    marks,
    module_arguments,
    transformed_modules,
    trees,
)
from gradtools.torch.compiling import Dynamo, compiled, is_compiling, uncompiled
from gradtools.torch.edits import edited, tied
from gradtools.torch.functorch_wrappers import PLAIN, is_inexact, is_wrapped, may_have_no_value
from gradtools.torch.known_errors import explained
from gradtools.torch.many_tangents import jvps, restarting
from gradtools.torch.modes import is_followed
from gradtools.torch.rules.installing import apply_rule, apply_rule_by_key
from gradtools.torch.rules.transposing import pull, push, transpose

if TYPE_CHECKING:
    from gradtools.arguments.chunks import ChunkOptions

Tensor = torch.Tensor


_REAL = {  # dynamo does not trace dtype.to_real
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # dtypes in which sums of squares do not overflow
_TINY = torch.finfo(torch.float64).tiny


class TorchBackend(FrameworkBackend):
    """Implements `gradtools.backend.Backend` for PyTorch.

    The engines and rules are imported with this module. Other members are imported on first access.
    """

    name, package = "torch", "gradtools.torch"

    @property
    def xp(self) -> Any:
        return arrays.xp()

    # --- pytrees

    flatten = staticmethod(trees.flatten)
    flatten_arrays = staticmethod(trees.flatten_arrays)
    unflatten = staticmethod(trees.unflatten)
    leaf_paths = staticmethod(trees.leaf_paths)
    flatten_static = staticmethod(trees.flatten_static)
    treedef_of_static = staticmethod(trees.treedef_of_static)
    static_treedef = staticmethod(trees.static_treedef)
    unflatten_static = staticmethod(trees.unflatten_static)

    # --- arrays

    array_type = Tensor

    def is_array(self, x: Any, /) -> bool:
        return isinstance(x, Tensor)  # torch.is_tensor is True for NumPy arrays in dynamo

    is_inexact = staticmethod(is_inexact)

    def is_traced(self, x: Any) -> bool:
        return isinstance(x, Tensor) and may_have_no_value(x)

    def number_on_host(self, x: Array) -> Any:
        known = type(x) in PLAIN and x.device.type == "cpu" and not may_have_no_value(x)
        return x.item() if known and not is_followed() else None

    def is_complex(self, x: Array) -> bool:
        return x.is_complex()

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    asarray = staticmethod(arrays.asarray)
    to_numpy = staticmethod(arrays.to_numpy)
    random_key = staticmethod(arrays.random_key)  # not lazy: compiled code may call `random_key`
    split_key = staticmethod(arrays.split_key)  # not lazy: compiled code may call `split_key`

    def as_leaf(self, x: Any) -> Any:
        # NumPy's float64 and complex128 are subclasses of float and complex, and are weakly typed
        # too.
        is_number = isinstance(x, (float, complex)) or not hasattr(x, "__array__")
        return x if is_number else self.asarray(x)

    def cast(self, x: Any, like: Array | str) -> Array:
        dtype = getattr(torch, like) if isinstance(like, str) else like.dtype
        if isinstance(x, Tensor):
            return x.to(dtype)
        if isinstance(like, str):
            return torch.as_tensor(x).to(dtype)
        if isinstance(x, (bool, int, float, complex)):
            return torch.full((), x, dtype=dtype, device=like.device)
        return torch.as_tensor(x, device=like.device).to(dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        dtype = _REAL.get(like.dtype, like.dtype)
        if isinstance(x, Tensor):
            return x.to(dtype)
        # The scalar is created on the CPU, because a scalar on the CPU can be combined with tensors
        # on any device.
        make = partial(torch.full, ()) if isinstance(x, (float, int)) else torch.tensor
        return make(x, dtype=dtype, device="cpu")

    def clip(self, x: Array, bound: Any) -> Array:
        if isinstance(bound, float) and bound > torch.finfo(x.dtype).max:
            return x  # x's dtype cannot represent the bound
        return x.clamp(-bound, bound)

    def clipped_by_norm(self, xs: list[Array], bound: Any) -> list[Array] | None:
        wide = [_WIDE.get(x.dtype) for x in xs]
        if None in wide or any(x.device.type == "mps" for x in xs):  # mps has no float64
            return None
        norm_of = torch.linalg.vector_norm
        norms = [norm_of(x, dtype=dtype) for x, dtype in zip(xs, wide, strict=True)]
        norm = norms[0] if len(norms) == 1 else norm_of(torch.stack(norms))
        # If all entries are zero, the results are zero; an infinite entry makes all results NaN.
        norm = norm.clamp(min=_TINY).nan_to_num(nan=math.nan, posinf=math.nan)
        factor = norm.clamp(max=bound) / norm
        narrow = (torch.float16, torch.bfloat16)
        scaled = ((x.float() if x.dtype in narrow else x) * factor for x in xs)
        return [y if y.dtype is x.dtype else y.to(x.dtype) for x, y in zip(xs, scaled, strict=True)]

    def zeros_like(self, x: Array) -> Array:
        return torch.zeros_like(x, requires_grad=False)

    def zeros(self, aval: Any, device_of: Array) -> Array:
        return torch.zeros(aval[0], dtype=aval[1], device=device_of.device)

    ones_like = staticmethod(partial(torch.ones_like, requires_grad=False))

    def unit_basis(self, x: Array, before: int = 0, after: int = 0) -> Array:
        count, options = x.numel(), {"dtype": x.dtype, "device": x.device}
        basis = torch.eye(count, **options)
        if before or after:
            zeros = [torch.zeros(n, count, **options) for n in (before, after)]
            basis = torch.cat((zeros[0], basis, zeros[1]))
        return basis.reshape(len(basis), *x.shape)

    def split(self, x: Array, parts: Sequence[slice]) -> Sequence[Array]:
        if x.requires_grad or len(parts) < 2:  # outputs of `split` cannot be written in place
            return super().split(x, parts)
        return x[: parts[-1].stop].split([part.stop - part.start for part in parts])

    # --- derivatives

    vjp = staticmethod(engines.vjp)
    reached = staticmethod(engines.reached)
    jvp = staticmethod(engines.jvp)

    jvps = staticmethod(jvps)  # not a LazyMember, because dynamo cannot trace an import

    linearize = staticmethod(engines.linearize)

    abstract_eval = LazyMember("rules.checking")

    def linear_map(self, run: Callable[..., Any], native: Any) -> Callable[..., Any]:
        # dynamo traces functools.partial, but not its subclass LinearFunction
        return (partial if is_compiling() else LinearFunction)(run, native)

    def direct_calls(self, of: Any) -> Any:
        from gradtools.torch.rules.signatures import Calls

        has_rule = bool(of.bwd or of.jvp)
        call = Calls(of).call if has_rule and not of.symbolic_zeros else None
        if not hasattr(of, "kernel"):
            return call
        from gradtools.torch.host import KernelCalls

        return KernelCalls(of, call).call

    apply_rule_by_key = staticmethod(apply_rule_by_key)

    compiler = Dynamo()

    apply_rule = staticmethod(apply_rule)
    edited = staticmethod(edited)
    tied = staticmethod(tied)
    transpose = staticmethod(transpose)
    pull = staticmethod(pull)
    push = staticmethod(push)

    def stop_gradient(self, x: Array) -> Array:
        return x.detach()

    closure_converted = LazyMember("captured_tensors")

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        """Calls `f(args)`.

        If f converts a tensor of a torch.func transform to NumPy, f runs as a host kernel instead.
        """
        try:
            return f(args)
        except RuntimeError as error:
            leaves, treedef = trees.flatten(like)
            xs, argdef = trees.flatten(args)
            # `to_numpy` raises RuntimeRefusal if a tensor has no values.
            reads = is_of("torch", error) or isinstance(error, RuntimeRefusal)
            if not (reads and any(map(is_wrapped, xs))):
                raise
            from gradtools.host_kernels import ArraySpec, Kernel  # imported on first use

            out = [ArraySpec(tuple(y.shape), self.dtype_name(y)) for y in leaves]
            names = [self.dtype_name(x) for x in xs]

            def run(*values: Any) -> list[Any]:
                given = [
                    self.cast(arrays.asarray(v), n) for v, n in zip(values, names, strict=True)
                ]
                result, came = self.flatten_like(treedef, f(trees.unflatten(argdef, given)))
                if not is_same(came, treedef):
                    raise GradtoolsError(
                        f"straight_through: the function returned the structure {in_words(came)}, "
                        f"but its surrogate has the structure {in_words(treedef)}."
                    ) from None
                pairs = zip(result, out, strict=True)
                return [arrays.to_numpy(self.cast(y, spec.dtype)) for y, spec in pairs]

            call, xs = Kernel(run, out).bind(self, xs)
            return trees.unflatten(treedef, self.call_kernel(call, xs))

    # --- the framework's own transforms

    def vmap(self, f: Any, in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
        return torch.vmap(f, in_axes, out_axes, randomness="different")

    restarting = staticmethod(restarting)

    def map_batches(
        self, f: Any, batch: list[Array], chunk_size: int | None, one_draw: bool = False
    ) -> list[Array]:
        if chunk_size == 1:
            rows = [f(*example) for example in zip(*batch, strict=True)]
            return [torch.stack(column) for column in zip(*rows, strict=True)]
        # Compiled code cannot restore the random state for each chunk.
        one_draw = one_draw and not (chunk_size and is_compiling())
        with explained(engines.caller_of(f)):
            mapped = torch.vmap(
                lambda *xs: tuple(f(*xs)),
                randomness="same" if one_draw else "different",
                chunk_size=chunk_size,
            )
            return list(mapped(*batch))

    def checkpoint(self, f: Any, options: ChunkOptions) -> Callable[..., Any]:
        return partial(_checkpointed, self, options, f)

    marked, retaining = marks.marked, marks.retaining

    like_module = staticmethod(transformed_modules.like_module)

    opened = staticmethod(module_arguments.opened)
    attaching = staticmethod(module_arguments.Opened.attaching)
    part_of = staticmethod(module_arguments.part_of)

    def compile(self, f: Any, **options: Any) -> Callable[..., Any]:
        return compiled(f, **options)

    # --- chunks

    weighs_sums = True
    is_recomputing = LazyMember("recomputation")
    frozen_uses = LazyMember("freezing", "Uses")


def _checkpointed(
    backend: TorchBackend, options: ChunkOptions, f: Any, /, *args: Any, **kwargs: Any
) -> Any:
    if is_compiling():
        if function_modes.traced:  # torch.func does not support the operator of checkpoint
            return f(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(f, *args, use_reentrant=False, **kwargs)
    from gradtools.torch import chunking

    return uncompiled(chunking.checkpointed, backend, f, args, kwargs, options)
