"""The waist in PyTorch: what `gradtools.backend.Backend` asks. `engines.py` differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from gradtools.backend import Array, Fun, Staged, backend_of
from gradtools.errors import GradtoolsError, is_of
from gradtools.torch import _upstream as upstream
from gradtools.torch import arrays, engines, parts, trees, wrapping
from gradtools.torch.compiling import compiled, is_compiling, uncompiled
from gradtools.torch.engines import asked_of
from gradtools.torch.refusals import explained
from gradtools.torch.rules import apply_rule, apply_rule_by_key, transpose
from gradtools.torch.transposing import pull, push, value_and_push
from gradtools.torch.wrappers import is_inexact, is_wrapped

if TYPE_CHECKING:
    from gradtools.chunking import Chunks, Options
    from gradtools.host import Kernel
    from gradtools.rules import Rule
    from gradtools.seeing.graph import Graph
    from gradtools.seeing.program import Program

Tensor = torch.Tensor


_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


class TorchBackend:
    """What `gradtools.backend.Backend` asks, by PyTorch.

    The engines and the rules come with it; a member that imports a room is one of those that most
    programs never ask for, so that an import of gradtools stays light.
    """

    never_changes = True  # for a walk over what a function holds

    name = "torch"
    hvp_mode = "reverse_over_reverse"

    @property
    def xp(self) -> Any:
        return arrays.xp()

    @property
    def accumulation(self) -> Any:
        from gradtools.torch import accumulate

        return accumulate

    def __reduce__(self) -> Any:
        return backend_of, (self.name,)

    # --- pytrees

    flatten = staticmethod(trees.flatten)
    unflatten = staticmethod(trees.unflatten)
    leaf_paths = staticmethod(trees.leaf_paths)
    sketch = staticmethod(trees.sketch)
    from_sketch = staticmethod(trees.from_sketch)
    sketch_of = staticmethod(trees.sketch_of)
    draw = staticmethod(trees.draw)

    # --- arrays

    def is_array(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    is_inexact = staticmethod(is_inexact)

    def is_complex(self, x: Array) -> bool:
        return x.is_complex()

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    asarray = staticmethod(arrays.asarray)
    to_numpy = staticmethod(arrays.to_numpy)
    key = staticmethod(arrays.key)
    split = staticmethod(arrays.split)
    fold_in = staticmethod(arrays.fold_in)

    def as_leaf(self, x: Any) -> Any:
        # NumPy's float64 and complex128 are Python's numbers too, and weak as these.
        is_number = isinstance(x, float | complex) or not hasattr(x, "__array__")
        return x if is_number else self.asarray(x)

    def cast(self, x: Any, like: Array | str) -> Array:
        dtype = getattr(torch, like) if isinstance(like, str) else like.dtype
        if isinstance(x, Tensor):
            return x.to(dtype)
        if isinstance(like, str):
            return torch.as_tensor(x).to(dtype)
        if isinstance(x, bool | int | float | complex):
            return torch.full((), x, dtype=dtype, device=like.device)
        return torch.as_tensor(x, device=like.device).to(dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        dtype = _REAL.get(like.dtype, like.dtype)
        # A single number on the CPU goes with arrays anywhere; the default device may be another.
        return x.to(dtype) if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")

    def zeros_like(self, x: Array) -> Array:
        return torch.zeros_like(x, requires_grad=False)

    def look(self, x: Array) -> Any:
        return tuple(x.shape), x.dtype

    def zeros(self, look: Any, beside: Array) -> Array:
        return torch.zeros(look[0], dtype=look[1], device=beside.device)

    def ones_like(self, x: Array) -> Array:
        return torch.ones_like(x, requires_grad=False)

    def unit_basis(self, x: Array) -> Array:
        eye = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
        return eye.reshape(x.numel(), *x.shape)

    def is_known_zero(self, x: Array) -> bool:
        return False

    def is_symbolic_zero(self, x: Any) -> bool:
        return False

    # --- derivatives

    def stage(self, fun: Fun, leaves: list[Array]) -> Staged:
        return Staged(fun)

    vjp = staticmethod(engines.vjp)
    jvp = staticmethod(engines.jvp)

    def jvps(self, fun: Fun, leaves: list[Array], many: Any) -> Any:
        from gradtools.torch import kernels

        return kernels.jvps(fun, leaves, many)

    linearize = staticmethod(engines.linearize)

    def sketch_values(self, fun: Callable[..., list[Array]], *xs: Array) -> None:
        from gradtools.torch import checking

        return checking.sketch_values(fun, *xs)

    def direct_calls(self, of: Any) -> Any:
        from gradtools.torch.direct import DirectCalls

        return DirectCalls(of) if DirectCalls.fit(of) else None

    def outliving(self, call: Any, outs: Any) -> tuple[Any, Any]:
        return call, outs

    def linear_map(self, run: Callable[..., Any], native: Any) -> Callable[..., Any]:
        return partial(run, native)

    def constant(self, x: Array, message: str, *sources: Any) -> Array:
        tracked = [s for s in sources if isinstance(s, Tensor) and s.requires_grad]
        if not tracked or not torch.is_grad_enabled() or not is_inexact(x):
            return x
        return _Constant.apply(message, x, *tracked)

    apply_rule_by_key = staticmethod(apply_rule_by_key)

    compiling = staticmethod(is_compiling)

    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]:
        return apply_rule(rule, *xs)

    transpose = staticmethod(transpose)
    pull = staticmethod(pull)
    push = staticmethod(push)
    value_and_push = staticmethod(value_and_push)

    def attempt(self, fun: Callable[..., list[Array]], *xs: Array) -> list[Array]:
        return fun(*xs)

    def stop_gradient(self, x: Array) -> Array:
        return x.detach()

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        """`f(args)`; inside functorch's levels, if f wants NumPy arrays, under all of them."""
        try:
            return f(args)
        except RuntimeError as error:
            shapes, treedef = trees.flatten(like)
            xs, argdef = trees.flatten(args)
            if not (is_of("torch", error) and any(map(is_wrapped, xs))):
                raise

            def run(*values: Tensor) -> list[Tensor]:
                found, came = trees.flatten(f(trees.unflatten(argdef, values)))
                if came != treedef:
                    raise GradtoolsError(
                        f"straight_through: the function returned the structure {came}, its "
                        f"surrogate {treedef}; they must be the same."
                    ) from None
                return [self.cast(y, s) for y, s in zip(found, shapes, strict=True)]

            return trees.unflatten(treedef, _OnHost.apply(run, *xs))

    def call_kernel(self, call: Any, xs: Sequence[Array]) -> list[Array]:
        from gradtools.torch import host

        return host.call_kernel(call, xs)

    @cached_property
    def call_now(self) -> Callable[[Kernel, Sequence[Any]], Any]:
        from gradtools.torch import host

        return partial(host.call_now, self)

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        def constant(*args: Any) -> Any:
            return fun(*args)

        return upstream.marked_constant(constant)

    def refuse_to_compile(self, reason: str) -> None:
        if is_compiling():
            upstream.break_graph(reason)

    # --- the framework's own transforms

    def vmap(self, f: Any, in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
        return torch.vmap(f, in_axes, out_axes, randomness="different")

    def map_batches(self, f: Any, batch: list[Array], chunk_size: int | None) -> list[Array]:
        if chunk_size == 1:
            rows = [f(*example) for example in zip(*batch, strict=True)]
            return [torch.stack(column) for column in zip(*rows, strict=True)]
        with explained(asked_of(f)):
            mapped = torch.vmap(
                lambda *xs: tuple(f(*xs)), randomness="different", chunk_size=chunk_size
            )
            return list(mapped(*batch))

    def checkpoint(self, f: Any, options: Options) -> Callable[..., Any]:
        return partial(_checkpointed, self, options, f)

    like_module = staticmethod(wrapping.like_module)

    opened = staticmethod(parts.opened)
    part_of = staticmethod(parts.part_of)

    def repeatable(self, asked: str, f: Any) -> Any:
        return f  # a recorded run is put back

    def is_model(self, x: Any) -> bool:
        return isinstance(x, torch.nn.Module)

    def model_of(self, f: Any) -> Any:
        return f if self.is_model(f) else None

    def held(self, asked: str, model: Any) -> Any:
        from gradtools.torch import training

        return training.held(asked, model)

    def optimised(self, asked: str, optimizer: Any, model: Any, held: Any) -> Any:
        from gradtools.torch import training

        return training.optimised(asked, optimizer, model, held)

    def lifted(self, asked: str, f: Any, args: Any, kwargs: Any, arrays: Any) -> Any:
        return None

    def compile(self, f: Any, **options: Any) -> Callable[..., Any]:
        return compiled(f, **options)

    # --- chunks

    uncompiled = staticmethod(uncompiled)

    def explicit(self, asked: str, fun: Any, own: Any, xs: Any, sides: Any) -> Any:
        return fun, []  # what it closes over is looked at where it runs

    def sweep(self, *args: Any, **kwargs: Any) -> Any:
        from gradtools.torch import tiling

        return tiling.sweep(*args, **kwargs)

    def fold(self, *args: Any, **kwargs: Any) -> Any:
        from gradtools.torch import tiling

        return tiling.fold(*args, **kwargs)

    def sharded_like(self, x: Tensor, other: Tensor) -> Tensor:
        return x  # a DTensor tells each operation what to do

    def tile_bytes(self, *args: Any, **kwargs: Any) -> int:
        from gradtools.torch import tiling

        return tiling.tile_bytes(*args, **kwargs)

    def run_chunks(self, chunks: Chunks) -> tuple[list[Array], list[Array]]:
        from gradtools.torch import chunking

        return chunking.run_chunks(chunks)

    def sum_chunks(self, chunks: Chunks) -> list[Array]:
        from gradtools.torch import chunking

        return chunking.sum_chunks(chunks)

    @cached_property
    def is_replaying(self) -> Callable[[], bool]:
        from gradtools.torch import watching

        return watching.asks_is_replaying

    def gather(self, x: Any, axis_name: Any, group: Any) -> Any:
        from gradtools.torch import gathering

        return gathering.gather(x, axis_name, group)

    def frozen_uses(self, budget: int | None) -> Any:
        from gradtools.torch import freezing

        return freezing.Uses(budget)

    def run_frozen(self, whole: Chunks, uses: Any) -> list[Array]:
        from gradtools.torch import freezing

        return freezing.run_frozen(whole, uses)

    # --- seeing

    def record(self, run: Any, leaves: Sequence[Any], names: Sequence[str]) -> Any:
        from gradtools.torch import seeing

        return seeing.record(run, leaves, names)

    def vanishing(self, *args: Any) -> Any:
        from gradtools.torch import vanishing

        return vanishing.vanishing(*args)

    def watchable(self) -> bool:
        from gradtools.torch import seeing

        return seeing.watchable()

    def rerun(self, run: Any, leaves: Sequence[Any]) -> Sequence[Any]:
        from gradtools.torch import seeing

        return seeing.rerun(run, leaves)

    def gradient_graph(self, asked: Any) -> Graph:
        from gradtools.torch import passes

        return passes.gradient_graph(asked)

    @staticmethod
    def formula_graph(program: Program) -> Graph:
        """One run in the vocabulary of the formula."""
        from gradtools.torch import vocabulary

        return vocabulary.formula_graph(program)

    @staticmethod
    def trying(program: Program, wide: bool) -> AbstractContextManager[Any]:
        """Around attempts at a formula."""
        from gradtools.torch import vocabulary

        return vocabulary.trying(program, wide)

    def measure(self, f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        from gradtools.torch import measures

        return measures.measure(f, args, kwargs)

    def functionalize(self, module: Any, **options: Any) -> Any:
        from gradtools.torch import modules

        return modules.functionalize(module, **options)


def _checkpointed(
    backend: TorchBackend, options: Options, f: Any, /, *args: Any, **kwargs: Any
) -> Any:
    if is_compiling() and not engines.is_inside():
        from torch.utils.checkpoint import checkpoint

        return checkpoint(f, *args, use_reentrant=False, **kwargs)
    from gradtools.torch import chunking

    # torch.func, which differentiates in compiled code, does not go through a checkpoint there.
    return uncompiled(chunking.checkpointed, backend, f, args, kwargs, options)


class _Constant(torch.autograd.Function):
    """The identity; whoever asks for a derivative through it is told that there is none."""

    @staticmethod
    def forward(message: str, x: Tensor, *sources: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        raise GradtoolsError(ctx.message)


class _OnHost(torch.autograd.Function):
    """A function on plain tensors, called beneath functorch's levels. It has no derivative."""

    @staticmethod
    def forward(run: Callable[..., list[Tensor]], *xs: Any) -> tuple[Tensor, ...]:
        return tuple(run(*xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.count = len(inputs)
        ctx.mark_non_differentiable(*outputs)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *dxs: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Any, *xs: Any) -> Any:
        def example(i: int) -> list[Any]:
            dims = zip(xs, in_dims[1:], strict=True)
            return [x if d is None else x.select(d, i) for x, d in dims]

        rows = [_OnHost.apply(run, *example(i)) for i in range(info.batch_size)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), 0
