"""Counts floating-point operations in PyTorch by a TorchDispatchMode.

The mode sees every operation that reaches a backend, also those of backward passes and tangents.
Products, convolutions, reductions and elementary functions have a counting rule here. Composite
operations such as softmax or layer norm are decomposed by PyTorch's own decompositions on meta
tensors, and their parts are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from gradtools.seeing import measures as costs
from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
Rule = Callable[..., int]  # (func, args, kwargs, out) -> operations


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
        key = _key(func, args, kwargs)
        if key not in self._known:
            self._known[key] = _cost(func, args, kwargs, out)
        total, unknown = self._known[key]
        self.total += total
        self.unknown |= unknown
        return out


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = upstream.tree_flatten((args, kwargs))
    return func, spec, tuple([_sketch(x) for x in leaves])


def _sketch(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return x if isinstance(x, int | float | complex | str | None) else repr(x)


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, frozenset[str]]:
    """The operations of one call, and the names of parts without a counting rule."""
    nothing = frozenset[str]()
    name = _name(func)
    rule = _rules().get(name)
    if rule is not None:
        return rule(func, args, kwargs, out), nothing
    free = name in _FREE or func.is_view or torch.Tag.inplace_view in func.tags
    if free or not any(map(_is_inexact, upstream.tree_leaves(out))):
        return (0, frozenset([str(func)])) if _is_foreign(func) else (0, nothing)
    if name.startswith("_foreach_"):
        return _of_each(name.removeprefix("_foreach_"), args, out)
    parts = _in_parts(func, args, kwargs)
    if parts is not None:
        return parts.total, frozenset(parts.unknown)
    return _last_resort(func, args, kwargs, out)


def _name(func: Any) -> str:
    """The operation's name without the underscore of its in-place variant."""
    name = upstream.schema_of(func).name.partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_foreign(func: Any) -> bool:
    """Whether it is a user's custom operation, which is opaque."""
    return func.namespace not in ("aten", "prims", "prim", "debugprims", "profiler")


def _last_resort(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, frozenset[str]]:
    """Fallbacks: PyTorch's flop counter, one per element of pointwise operations, or unknown."""
    from torch.utils.flop_counter import flop_registry

    if func.overloadpacket in flop_registry:
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)), frozenset()
    if torch.Tag.pointwise in func.tags:
        return _elements(out), frozenset()
    if not any(isinstance(x, Tensor) for x in upstream.tree_leaves((args, kwargs))):
        return 0, frozenset()  # a factory function
    return 0, frozenset([str(func)])


def _in_parts(func: Any, args: Any, kwargs: Any) -> Flops | None:
    """The count of the decomposition's operations; None if there is no decomposition."""
    has = upstream.has_kernel_for
    whole = not _is_foreign(func) and has(func.name(), "CompositeImplicitAutograd")
    apart = func.decompose if whole else upstream.decompositions().get(func)
    if apart is None:
        return None
    with upstream.disable_current_modes(), torch.no_grad(), Flops() as parts:
        args, kwargs = upstream.tree_map(_to_meta, (args, kwargs))
        if apart(*args, **kwargs) is NotImplemented:
            return None
    return parts


def _to_meta(x: Any) -> Any:
    """The same tensor without contents; a device is that of such tensors."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


# --- tensors -----------------------------------------------------------------------------


def _is_inexact(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _elements(out: Any) -> int:
    return sum(x.numel() for x in upstream.tree_leaves(out) if _is_inexact(x))


def _first(out: Any) -> Tensor:
    return next(x for x in upstream.tree_leaves(out) if isinstance(x, Tensor))


def _tensors(args: Any) -> Iterator[Tensor]:
    return (x for x in args if isinstance(x, Tensor))


# --- rules -------------------------------------------------------------------------------

_KINDS = {"add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div", "neg": "neg"}
_ELEMENTARY = (
    *("abs", "sign", "sgn", "floor", "ceil", "round", "trunc", "nextafter", "remainder", "fmod"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "sqrt", "rsqrt", "cbrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "reciprocal"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "relu"),
    *("erf", "erfc", "erfinv", "erf_inv", "lgamma", "digamma", "polygamma"),
    *("maximum", "minimum", "fmax", "fmin"),
)
_REDUCTIONS = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "max", "max": "max"}
_REDUCTIONS |= {"min": "max", "nansum": "sum"}
_RUNNING = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "max"}
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


def _elementwise(kind: str) -> Rule:
    def rule(func: Any, args: Any, kwargs: Any, out: Any) -> int:
        x = _first(out)
        if not _is_inexact(x):
            return 0
        scaled = kwargs.get("alpha", 1) != 1  # add and sub of a multiple
        one = costs.weight(kind, x.is_complex())
        return x.numel() * (one + (costs.weight("mul", x.is_complex()) if scaled else 0))

    return rule


def _power(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    x, exponent = _first(out), args[1]
    whole = not isinstance(exponent, Tensor) and float(exponent).is_integer()
    each = costs.whole_power(int(exponent), x.is_complex()) if whole else 1
    return x.numel() * each if _is_inexact(x) else 0


def _clamped(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    bounds = [*args[1:3], kwargs.get("min"), kwargs.get("max")]
    return _elements(out) * sum(bound is not None for bound in bounds)


def _reduced(kind: str) -> Rule:
    def rule(func: Any, args: Any, kwargs: Any, out: Any) -> int:
        x, result = args[0], _first(out)
        if not _is_inexact(result):
            return 0
        other = args[1] if len(args) > 1 else None
        if isinstance(other, Tensor):  # the elementwise max(a, b)
            return result.numel()
        one = costs.weight(kind, result.is_complex())
        return max(x.numel() - result.numel(), 0) * one

    return rule


def _mean(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    result = _first(out)
    division = costs.weight("div", result.is_complex())
    return _reduced("sum")(func, args, kwargs, out) + result.numel() * division


def _running(kind: str) -> Rule:
    def rule(func: Any, args: Any, kwargs: Any, out: Any) -> int:
        x, dim = _first(out), args[1]
        length = x.shape[dim] if x.dim() else 1
        lanes = x.numel() // max(length, 1)
        return (x.numel() - lanes) * costs.weight(kind, x.is_complex()) * _is_inexact(x)

    return rule


def _variance(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Mean, differences, squares and their mean: 4 operations per element."""
    roots = _elements(_first(out)) if _name(func).startswith("std") else 0
    return 4 * args[0].numel() + roots


def _product(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """mm, bmm, mv, dot: the last axis of the first factor is contracted."""
    a, result = args[0], _first(out)
    return costs.product(result.numel(), a.shape[-1], result.is_complex())


def _added_product(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """addmm, baddbmm, addmv, addbmm: beta * input + alpha * a @ b."""
    a, result = args[1], _first(out)
    factors = sum(kwargs.get(name, 1) not in (0, 1) for name in ("alpha", "beta"))
    added = 0 if kwargs.get("beta", 1) == 0 else costs.weight("add", result.is_complex())
    extra = added + factors * costs.weight("mul", result.is_complex())
    contracted = a.shape[-1] * (a.shape[0] if _name(func) == "addbmm" else 1)
    return costs.product(result.numel(), contracted, result.is_complex()) + result.numel() * extra


def _outer(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    result = _first(out)
    return result.numel() * sum(costs.weight(kind, result.is_complex()) for kind in ("mul", "add"))


def _meetings(
    x: Tensor, w: Tensor, y: Tensor, stride: Any, padding: Any, dilation: Any
) -> list[int]:
    """Along each axis of the convolution of x with w that gives y: meetings."""
    axes = len(x.shape) - 2
    each = [_spread(v, axes) for v in (stride, padding, dilation)]
    return [
        costs.meetings(outs, taps, ins, s, low, tap_step=d)
        for outs, taps, ins, s, low, d in zip(
            y.shape[2:], w.shape[2:], x.shape[2:], *each, strict=True
        )
    ]


def _spread(value: Any, axes: int) -> Sequence[int]:
    result = list(value) if isinstance(value, list | tuple) else [value]
    return result * axes if len(result) == 1 else result


def _conv_once(x: Tensor, w: Tensor, y: Tensor, options: Sequence[Any]) -> int:
    """A convolution, transposed or not; each of its backward passes costs the same."""
    stride, padding, dilation, transposed = options[:4]
    if transposed:
        x, y = y, x  # w is (channels of the input, of the output by group)
    met = _meetings(x, w, y, stride, padding, dilation)
    return costs.convolution(met, x.shape[0], w.shape[1], w.shape[0], y.is_complex())


def _convolution(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    x, w, bias, *options = args
    result = _conv_once(x, w, out, options)
    return result + (out.numel() * costs.weight("add", out.is_complex()) if bias is not None else 0)


def _convolution_backward(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    ct, x, w, _, *options = args
    mask = options[6]
    once = _conv_once(x, w, ct, options)
    of_bias = (ct.numel() - ct.shape[1]) * costs.weight("add", ct.is_complex())
    return once * (mask[0] + mask[1]) + of_bias * mask[2]


def _pooled(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """max_pool: n - 1 comparisons per window of n; avg_pool: n - 1 additions and a division."""
    result, window = _first(out), args[1]
    axes = int(upstream.schema_of(func).name.split("pool")[1][0])
    taps = math.prod(_spread(window, axes))
    return result.numel() * (taps if "avg" in _name(func) else taps - 1)


def _pooled_back(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """max_pool: one addition per cotangent; avg_pool: a division, and n additions."""
    ct, axes = args[0], int(upstream.schema_of(func).name.split("pool")[1][0])
    if "avg" not in _name(func):
        return ct.numel()
    return ct.numel() * (1 + math.prod(_spread(args[2], axes)))


def _added_at(position: int) -> Rule:
    """The rule of operations that add each element of one argument into another tensor."""

    def rule(func: Any, args: Any, kwargs: Any, out: Any) -> int:
        x = args[position]
        return x.numel() * costs.weight("add", x.is_complex()) if _is_inexact(x) else 0

    return rule


def _put(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return _added_at(2)(func, args, kwargs, out) if accumulates else 0


def _attention(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    q, k, v = args[:3]
    rows = math.prod(q.shape[:-1])
    return costs.attention(rows, k.shape[-2], q.shape[-1], v.shape[-1])


def _attention_back(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The recomputed scores, and the four products of the backward pass."""
    _, q, k, v = args[:4]
    rows, keys = math.prod(q.shape[:-1]), k.shape[-2]
    return rows * (2 * keys * (3 * q.shape[-1] + 2 * v.shape[-1]) + 9 * keys)


def _lstm_layer(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """One direction of an LSTM layer on the CPU: per step two products, four gates, the cell.

    Per element of the state the gates take 4 functions, the new cell 2 products and a sum, the
    output a function and a product.
    """
    x, of_input, of_state = args[:3]
    state, rows = of_state.shape[1], x.shape[0] * x.shape[1]
    gates = rows * of_input.shape[0]
    products = sum(costs.product(gates, w.shape[1], False) for w in (of_input, of_state))
    biases = 2 * gates if args[12] else 0
    return products + biases + gates + rows * state * 9


def _lstm_layer_back(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The backward pass of one direction of an LSTM layer on the CPU, step by step.

    Each product has two transposed ones. The gradients of the state's weights and of both states
    are summed over steps, those of the biases over all rows. The cell and its gates take 21
    operations per element of the state.
    """
    x, of_input, of_state = args[:3]
    (steps, batch), (wide, state) = x.shape[:2], of_state.shape
    gates = steps * batch * wide
    products = 2 * sum(costs.product(gates, w.shape[1], False) for w in (of_input, of_state))
    biases = 2 * (gates - wide) if args[17] else 0
    added = (steps - 1) * (of_state.numel() + 2 * batch * state)
    return products + biases + added + 21 * steps * batch * state


def _fourier(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    x, real = args[0], _name(func) != "_fft_c2c"
    lengths = [max(x.shape[d], out.shape[d]) for d in args[1]]
    return costs.fourier_flops(max(x.numel(), out.numel()), math.prod(lengths), real)


def _of_shape(cost: Callable[[Sequence[int]], int]) -> Rule:
    return lambda func, args, kwargs, out: cost(args[0].shape)


def _solve(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    return costs.triangular_solve(args[0].shape, _first(out).numel())


def _of_each(name: str, args: Any, out: Any) -> tuple[int, frozenset[str]]:
    """The cost of a ``_foreach_`` operation: per element of each tensor in the list."""
    tensors = [x for x in upstream.tree_leaves(args[0]) if _is_inexact(x)]
    if name in ("zero", "copy"):
        return 0, frozenset()
    each = {"addcmul": 3, "addcdiv": 3, "lerp": 3, "norm": 2}.get(name.rstrip("_"), 1)
    known = name in _KINDS or name in _ELEMENTARY or each > 1 or name == "pow"
    total = each * sum(x.numel() for x in tensors)
    return (total, frozenset()) if known else (0, frozenset([f"aten._foreach_{name}"]))


@cache
def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {name: _elementwise(kind) for name, kind in _KINDS.items()}
    rules |= {name: _elementwise("other") for name in _ELEMENTARY}
    rules |= {name: _reduced(kind) for name, kind in _REDUCTIONS.items()}
    rules |= {name: _running(kind) for name, kind in _RUNNING.items()}
    rules |= dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm"), _product)
    rules |= dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), _added_product)
    rules |= dict.fromkeys(("pow", "float_power"), _power)
    rules |= {
        "square": lambda func, args, kwargs, out: _power(func, (args[0], 2), kwargs, out),
        "addr": _outer,
        "mean": _mean,
        "clamp": _clamped,
    }
    rules |= dict.fromkeys(("var", "var_mean", "std", "std_mean"), _variance)
    rules |= dict.fromkeys(("convolution", "_convolution"), _convolution)
    rules["convolution_backward"] = _convolution_backward
    pools = [f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)]
    rules |= dict.fromkeys((*pools, "max_pool2d_with_indices", "max_pool3d_with_indices"), _pooled)
    rules |= {
        f"{name}_backward": _pooled_back
        for name in (*pools, "max_pool2d_with_indices", "max_pool3d_with_indices")
    }
    rules |= dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl", "put"), _put)
    rules |= dict.fromkeys(("scatter_add", "scatter_reduce", "index_add"), _added_at(3))
    rules["embedding_dense_backward"] = _added_at(0)
    kernels = ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
    kernels += ("cudnn_attention", "fused_attention_overrideable")
    for kernel in kernels:
        rules[f"_scaled_dot_product_{kernel}"] = _attention
        rules[f"_scaled_dot_product_{kernel}_backward"] = _attention_back
    rules["mkldnn_rnn_layer"] = _lstm_layer
    rules["mkldnn_rnn_layer_backward"] = _lstm_layer_back
    rules |= dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), _fourier)
    rules["linalg_cholesky_ex"] = rules["cholesky"] = _of_shape(costs.cholesky)
    rules["linalg_lu_factor_ex"] = _of_shape(costs.lu)
    rules["linalg_solve_triangular"] = rules["triangular_solve"] = _solve
    return rules
