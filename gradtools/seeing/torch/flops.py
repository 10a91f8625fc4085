"""Counts floating-point operations in PyTorch by a TorchDispatchMode.

The mode sees every operation that reaches a backend, also those of backward passes and tangents.
Products, convolutions, reductions and elementary functions have a counting rule here. Composite
operations such as softmax or layer norm are decomposed by PyTorch's own decompositions on meta
tensors, and their parts are counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from gradtools.seeing import measures as costs
from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor


class Flops(upstream.Watching):
    """A dispatch mode that counts floating-point operations.

    Attributes:
        total: The operations so far.
        unknown: The names of operations without a counting rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.unknown = set[str]()
        self._known: dict[Any, tuple[int, frozenset[str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        leaves, spec = upstream.tree_flatten((args, kwargs))
        key = func, spec, tuple([_sketch(x) for x in leaves])
        if key not in self._known:
            self._known[key] = _cost(func, args, kwargs, out)
        total, unknown = self._known[key]
        self.total += total
        self.unknown |= unknown
        return out


def _sketch(x: Any) -> Any:
    """What the cost of a call depends on, of one of its arguments."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return x if isinstance(x, int | float | complex | str | None) else repr(x)


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, frozenset[str]]:
    """The operations of one call, and the names of parts without a counting rule.

    What has no rule is counted in the parts of its decomposition, else by PyTorch's flop counter,
    else as one per element if it is pointwise.
    """
    known, unknown = frozenset[str](), frozenset([str(func)])
    name = upstream.schema_of(func).name.partition("::")[2]
    if name.endswith("_") and not name.endswith("__"):  # the in-place variant
        name = name[:-1]
    results = upstream.tree_leaves(out)
    first = next((x for x in results if isinstance(x, Tensor)), None)
    if first is not None:
        for rule in (_arithmetic, _kernels):
            if (count := rule(name, args, kwargs, first)) is not None:
                return count, known
    is_foreign = func.namespace not in ("aten", "prims", "prim", "debugprims", "profiler")
    is_free = name in _FREE or func.is_view or torch.Tag.inplace_view in func.tags
    if is_free or not any(map(_is_inexact, results)):
        return 0, unknown if is_foreign else known  # a user's custom operation is opaque
    if name.startswith("_foreach_"):
        return _of_each(name.removeprefix("_foreach_"), args)
    has = upstream.has_kernel_for
    is_composite = not is_foreign and has(func.name(), "CompositeImplicitAutograd")
    parts = _in_parts(
        func.decompose if is_composite else upstream.decompositions().get(func), args, kwargs
    )
    if parts is not None:
        return parts.total, frozenset(parts.unknown)
    from torch.utils.flop_counter import flop_registry

    if func.overloadpacket in flop_registry:
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)), known
    if torch.Tag.pointwise in func.tags:
        return sum(x.numel() for x in results if _is_inexact(x)), known
    is_factory = not any(isinstance(x, Tensor) for x in upstream.tree_leaves((args, kwargs)))
    return 0, known if is_factory else unknown


def _in_parts(decomposition: Any, args: Any, kwargs: Any) -> Flops | None:
    """The count of the decomposition's operations; None if there is no decomposition."""

    def to_meta(x: Any) -> Any:
        """The same tensor without contents; a device is that of such tensors."""
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    if decomposition is None:
        return None
    with upstream.disable_current_modes(), torch.no_grad(), Flops() as parts:
        args, kwargs = upstream.tree_map(to_meta, (args, kwargs))
        if decomposition(*args, **kwargs) is NotImplemented:
            return None
    return parts


def _is_inexact(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _of_each(name: str, args: Any) -> tuple[int, frozenset[str]]:
    """The cost of a ``_foreach_`` operation: per element of each tensor in the list."""
    tensors = [x for x in upstream.tree_leaves(args[0]) if _is_inexact(x)]
    if name in ("zero", "copy"):
        return 0, frozenset()
    each = {"addcmul": 3, "addcdiv": 3, "lerp": 3, "norm": 2}.get(name.rstrip("_"), 1)
    known = name in _ELEMENTWISE or each > 1 or name == "pow"
    total = each * sum(x.numel() for x in tensors)
    return (total, frozenset()) if known else (0, frozenset([f"aten._foreach_{name}"]))


# --- rules -------------------------------------------------------------------------------

_ELEMENTWISE = frozenset(
    """
    add sub rsub mul div neg
    abs sign sgn floor ceil round trunc nextafter remainder fmod exp exp2 expm1 log log2 log10 log1p
    sigmoid sqrt rsqrt cbrt sin cos tan asin acos atan atan2 reciprocal sinh cosh tanh asinh acosh
    atanh relu erf erfc erfinv erf_inv lgamma digamma polygamma maximum minimum fmax fmin
    """.split()
)
_REDUCTIONS = frozenset({"sum", "nansum", "prod", "amax", "amin", "max", "min"})
_FREE = frozenset(
    """
    clone copy _to_copy to contiguous alias detach lift_fresh lift where masked_fill
    masked_scatter fill zero conj_physical real imag view_as_complex view_as_real complex
    resolve_conj resolve_neg constant_pad_nd cat stack index index_select gather embedding take
    masked_select scatter index_copy index_fill slice_scatter select_scatter as_strided
    slice_backward select_backward roll flip tril triu repeat sort topk set resize empty_like
    zeros_like ones_like full_like rand_like randn_like bernoulli uniform normal random
    exponential multinomial convert_element_type broadcast_in_dim device_put copy_to diag_embed
    dropout _reshape_alias _unsafe_view _local_scalar_dense threshold_backward median new_zeros
    new_empty new_full new_ones split_with_sizes_copy diagonal_backward _pin_memory
    pixel_shuffle pixel_unshuffle slice_inverse maximum_value hardtanh_backward permute_copy
    kthvalue mode _pack_padded_sequence triu_indices tril_indices nanmedian randint randint_like
    _unique _unique2 unique_consecutive unique_dim as_strided_scatter resize_as lu_unpack
    _unsafe_masked_index _unsafe_index _fill_mem_eff_dropout_mask _cudnn_init_dropout_state
    """.split()
)
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
    + ("cudnn_attention", "fused_attention_overrideable")
)
_POOL = re.compile(r"(max|avg)_pool([123])d(?:_with_indices)?(_backward)?")


def _arithmetic(name: str, args: Any, kwargs: Any, y: Tensor) -> int | None:
    """The cost of elementwise operations, reductions and products; None for others."""
    n, is_complex = y.numel() * _is_inexact(y), y.is_complex()
    one = lambda kind: costs.weight(kind, is_complex)
    if name in _ELEMENTWISE:
        is_scaled = kwargs.get("alpha", 1) != 1  # add and sub of a multiple
        return n * (one("sub" if name == "rsub" else name) + (one("mul") if is_scaled else 0))
    if name in _REDUCTIONS:
        if not _is_inexact(y):
            return 0
        if len(args) > 1 and isinstance(args[1], Tensor):  # the elementwise max(a, b)
            return n
        return max(args[0].numel() - n, 0) * one(name.removeprefix("nan"))
    match name:
        case "mean":
            return max(args[0].numel() - n, 0) * one("sum") + n * one("div")
        case "cumsum" | "cumprod" | "cummax" | "cummin":
            length = y.shape[args[1]] if y.dim() else 1
            return (n - n // max(length, 1)) * one(name.removeprefix("cum"))
        case "pow" | "float_power" | "square":
            exponent = 2 if name == "square" else args[1]
            is_whole = not isinstance(exponent, Tensor) and float(exponent).is_integer()
            return n * (costs.whole_power(int(exponent), is_complex) if is_whole else 1)
        case "clamp":
            bounds = [*args[1:3], kwargs.get("min"), kwargs.get("max")]
            return n * sum(bound is not None for bound in bounds)
        case "var" | "var_mean" | "std" | "std_mean":  # mean, differences, squares, their mean
            return 4 * args[0].numel() + (n if name.startswith("std") else 0)
        case "mm" | "bmm" | "mv" | "dot" | "vdot" | "_int_mm":
            return costs.product(y.numel(), args[0].shape[-1], is_complex)
        case "addmm" | "baddbmm" | "addmv" | "addbmm":  # beta * input + alpha * a @ b
            a = args[1]
            contracted = a.shape[-1] * (a.shape[0] if name == "addbmm" else 1)
            factors = sum(kwargs.get(key, 1) not in (0, 1) for key in ("alpha", "beta"))
            added = 0 if kwargs.get("beta", 1) == 0 else one("add")
            whole = costs.product(y.numel(), contracted, is_complex)
            return whole + y.numel() * (added + factors * one("mul"))
        case "addr":
            return y.numel() * (one("mul") + one("add"))
    return None


def _kernels(name: str, args: Any, kwargs: Any, y: Tensor) -> int | None:
    """The cost of convolutions, pools, attention, factorizations and the like; None for others."""
    n, add = y.numel(), costs.weight("add", y.is_complex())
    if pool := _POOL.fullmatch(name):
        is_average, is_backward = pool[1] == "avg", pool[3]
        taps = math.prod(_spread(args[2 if is_backward else 1], int(pool[2])))
        if is_backward:  # an addition per cotangent; of an average a division and n additions
            return args[0].numel() * (1 + taps if is_average else 1)
        return n * (taps if is_average else taps - 1)
    if name in _ATTENTION:
        q, k, v = args[:3]
        return costs.attention(math.prod(q.shape[:-1]), k.shape[-2], q.shape[-1], v.shape[-1])
    if name.removesuffix("_backward") in _ATTENTION:
        # the recomputed scores, and the four products of the backward pass
        _, q, k, v = args[:4]
        rows, keys = math.prod(q.shape[:-1]), k.shape[-2]
        return rows * (2 * keys * (3 * q.shape[-1] + 2 * v.shape[-1]) + 9 * keys)
    match name:
        case "convolution" | "_convolution":
            x, w, bias, *options = args
            return _conv_once(x, w, y, options) + (n * add if bias is not None else 0)
        case "convolution_backward":
            ct, x, w, _, *options = args
            mask = options[6]
            of_bias = (ct.numel() - ct.shape[1]) * add
            return _conv_once(x, w, ct, options) * (mask[0] + mask[1]) + of_bias * mask[2]
        case "index_put" | "_unsafe_index_put" | "_index_put_impl" | "put":
            accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            return _added(args[2]) if accumulates else 0
        case "scatter_add" | "scatter_reduce" | "index_add":
            return _added(args[3])
        case "embedding_dense_backward":
            return _added(args[0])
        case "mkldnn_rnn_layer" | "mkldnn_rnn_layer_backward":
            return _lstm_layer(args, name.endswith("backward"))
        case "_fft_c2c" | "_fft_r2c" | "_fft_c2r":
            x = args[0]
            lengths = [max(x.shape[d], y.shape[d]) for d in args[1]]
            elements = max(x.numel(), n)
            return costs.fourier_flops(elements, math.prod(lengths), name != "_fft_c2c")
        case "linalg_cholesky_ex" | "cholesky":
            return costs.cholesky(args[0].shape)
        case "linalg_lu_factor_ex":
            return costs.lu(args[0].shape)
        case "linalg_solve_triangular" | "triangular_solve":
            return costs.triangular_solve(args[0].shape, n)
    return None


def _added(x: Tensor) -> int:
    """The cost of adding each element of a tensor into another tensor."""
    return x.numel() * costs.weight("add", x.is_complex()) if _is_inexact(x) else 0


def _spread(value: Any, axes: int) -> Sequence[int]:
    result = list(value) if isinstance(value, list | tuple) else [value]
    return result * axes if len(result) == 1 else result


def _conv_once(x: Tensor, w: Tensor, y: Tensor, options: Sequence[Any]) -> int:
    """A convolution of x with w, transposed or not; each of its backward passes costs the same."""
    stride, padding, dilation, transposed = options[:4]
    if transposed:
        x, y = y, x  # w is (channels of the input, of the output by group)
    axes = len(x.shape) - 2
    each = [_spread(v, axes) for v in (stride, padding, dilation)]
    met = [
        costs.meetings(outs, taps, ins, s, low, tap_step=d)
        for outs, taps, ins, s, low, d in zip(
            y.shape[2:], w.shape[2:], x.shape[2:], *each, strict=True
        )
    ]
    return costs.convolution(met, x.shape[0], w.shape[1], w.shape[0], y.is_complex())


def _lstm_layer(args: Any, is_backward: bool) -> int:
    """One direction of an LSTM layer on the CPU: per step two products, four gates, the cell.

    Per element of the state the gates take 4 functions, the new cell 2 products and a sum, the
    output a function and a product. In the backward pass each product has two transposed ones. The
    gradients of the state's weights and of both states are summed over steps, those of the biases
    over all rows. The cell and its gates take 21 operations per element of the state.
    """
    x, of_input, of_state = args[:3]
    (steps, batch), (wide, state) = x.shape[:2], of_state.shape
    gates = steps * batch * wide
    products = sum(costs.product(gates, w.shape[1], False) for w in (of_input, of_state))
    if not is_backward:
        biases = 2 * gates if args[12] else 0
        return products + biases + gates + steps * batch * state * 9
    biases = 2 * (gates - wide) if args[17] else 0
    added = (steps - 1) * (of_state.numel() + 2 * batch * state)
    return 2 * products + biases + added + 21 * steps * batch * state
