"""Forward rules for operations with a single tangent: f(dx, w) instead of PyTorch's own rules.

PyTorch's forward rules create a symbolic zero for the tangent of each weight, bias and number, and
multiply and add it: a linear layer takes three products instead of two, and a sum with a number
takes hundreds of microseconds (Python code determines the shape of such a sum). If only one operand
has a tangent, and the operation f is linear in that operand, this is enough:

    y = f(x, w)        dy = f(dx, w)

Operations that are not in the table, or that have several tangents, use PyTorch's rules; so do
those that PyTorch calls internally, which a function mode does not intercept.

Measured on five networks (MLPs, a CNN, a transformer) against PyTorch's rules: these need 0.8 of
the products and 0.33 to 0.97 of the time in a second derivative through `frozen`, 0.67 and 0.25 to
0.66 in `jvp` under no_grad. `NoProductsOfZero` alone saves the same products, but takes 1.1 to 1.6
and 1.4 to 2.4 times as long as these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

from gradtools.torch import _upstream as upstream
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents, is_plain, set_graphs
from gradtools.torch.forward_mode.pushing import pushed_by_pytorch

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_make: Callable[..., Tensor] = upstream.make_dual  # type: ignore[attr-defined]
_unpack: Callable[..., Any] = upstream.unpack_dual  # type: ignore[attr-defined]


class OneTangent(NoGradStopsTangents):
    """The mode of a dual level without a graph, outside of functorch's transforms.

    In a graph these rules would save primals without their tangents, which a gradient inside of f
    needs.

    Args:
        fixed: Tensors known to have no tangent, as long as they are not changed in place.
        caller: As in `NoGradStopsTangents`.
    """

    def __init__(self, fixed: Iterable[Tensor] = (), caller: str | None = None) -> None:
        super().__init__(hidden=True, caller=caller)
        self._fixed = [*fixed]  # kept alive: ids are reused
        versions = map(upstream.version_of, self._fixed)
        self._versions = dict(zip(map(id, self._fixed), versions, strict=True))

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        """Calls a function by its rule, or by PyTorch's if f records a graph itself."""
        seen = torch.is_grad_enabled()  # by f; if hidden, its operations record no graph
        rule = _RULES.get(fun) if self._hidden or not seen else None
        if rule is None or upstream.peek_interpreter_stack() is not None:
            return super().__torch_function__(fun, types, args, kwargs)
        # Whether no subclass overrides `__torch_function__`.
        is_usual = _PLAIN.issuperset(types) or all(map(is_plain, types))
        if not is_usual or not (seen or upstream.is_forward_mode_enabled()):
            return super().__torch_function__(fun, types, args, kwargs)
        for x in args:  # a loop, for speed: it runs at each operation
            if isinstance(x, Tensor) and x.layout is not _STRIDED:
                return super().__torch_function__(fun, types, args, kwargs)
        kwargs = kwargs or {}
        set_graphs(False)
        try:
            result = rule(self, fun, *args, **kwargs)
            return self.flowing(fun, types, args, kwargs) if result is None else result
        finally:
            set_graphs(seen)

    def parts(self, x: Any) -> tuple[Any, Tensor | None]:
        """A tensor's primal and tangent; None for no tangent."""
        known = self._versions.get(id(x))
        if (known is not None and known == upstream.version_of(x)) or not isinstance(x, Tensor):
            return x, None
        value, tangent = _unpack(x, level=self._level)
        return value, tangent

    def dual(self, y: Tensor, dy: Tensor) -> Tensor:
        """The dual number of y and its tangent."""
        return _make(y, dy, level=self._level)

    def fixes(self, xs: Iterable[Any]) -> bool:
        """Whether none of these has a tangent."""
        for x in xs:  # most of which are known
            version = self._versions.get(id(x))
            is_known = version is not None and version == upstream.version_of(x)
            if not is_known and self.parts(x)[1] is not None:
                return False
        return True


# --- rules: each returns the result, or None to leave the call to PyTorch ------------------------


def _as_it_is(mode: OneTangent, fun: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own rule, for unary operations: it creates no symbolic zero and is right."""
    return pushed_by_pytorch(fun, args, kwargs)


def _convolution(
    mode: OneTangent,
    fun: Any,
    input: Any = None,
    weight: Any = None,
    bias: Any = None,
    *how: Any,
    **named: Any,
) -> Any:
    """Convolution: input, weight, bias, then stride, padding and so on."""
    x, dx = mode.parts(input)
    if dx is None or weight is None or not mode.fixes((weight, bias)):
        return None
    dy = fun(dx, weight, None, *how, **named)
    return mode.dual(fun(x, weight, bias, *how, **named), dy)


def _linear(
    mode: OneTangent,
    fun: Any,
    input: Any = None,
    weight: Any = None,
    bias: Any = None,
    **others: Any,
) -> Any:
    """Linear layer. A memory-bound one takes both products as one, which reads the weight once."""
    x, dx = mode.parts(input)
    if others or dx is None or weight is None or not mode.fixes((weight, bias)):
        return None
    if _is_memory_bound(x, dx, weight, bias):
        y, dy = torch.unsafe_chunk(fun(torch.cat((x, dx)), weight), 2)
        y = y.clone() if bias is None else y + bias  # y and dy must not share a storage
        return mode.dual(y, dy.clone())
    if dx.dim() > 2:  # a non-contiguous input would be multiplied row by row
        dx = dx.contiguous()
    return mode.dual(fun(x, weight, bias), fun(dx, weight))


def _is_memory_bound(x: Tensor, dx: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether reading the weight dominates a linear layer, for inputs are few."""
    size = weight.numel()
    if size < _MANY or size < 8 * x.numel() or x.dim() < 2 or x.shape != dx.shape:
        return False
    plain = type(x) is type(dx) is Tensor and type(weight) in _PLAIN
    return plain and weight.layout is x.layout is _STRIDED and _one_dtype(x, dx, weight, bias)


def _product(
    mode: OneTangent, fun: Any, a: Any = None, b: Any = None, *more: Any, **named: Any
) -> Any:
    """Operations of two operands that are linear in each."""
    if more or named or b is None:  # a dtype of the result, say
        return None
    (a, da), (b, db) = mode.parts(a), mode.parts(b)
    if (da is None) == (db is None):
        return None
    return mode.dual(fun(a, b), fun(a if da is None else da, b if db is None else db))


def _quotient(mode: OneTangent, fun: Any, a: Any = None, b: Any = None, **named: Any) -> Any:
    """Operations that are linear in the first operand only."""
    return _product(mode, fun, a, b, **named) if mode.fixes((b,)) else None


def _sum(first: int, second: int) -> Any:
    """Sums of two operands with these signs."""

    def rule(
        mode: OneTangent, fun: Any, a: Any = None, b: Any = None, *more: Any, **named: Any
    ) -> Any:
        if more or named or b is None:  # a factor before b, say: torch.add(a, factor, b)
            return None
        (a, da), (b, db) = mode.parts(a), mode.parts(b)
        if da is not None and db is not None:
            alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            return mode.dual(fun(a, b), fun(da, db)) if alike else None
        dx, sign = (da, first) if db is None else (db, second)
        if dx is None:
            return None
        y = fun(a, b)
        dx = dx if sign > 0 else dx.neg()
        dx = dx if dx.shape == y.shape else dx.expand(y.shape)
        return mode.dual(y, dx.to(y.dtype, copy=True))  # y may be changed in place later

    return rule


def _layer_norm(
    mode: OneTangent,
    fun: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    """Layer norm: up to the weight its Jacobian is symmetric, so its pullback pushes forward."""
    if not mode.fixes((weight, bias)) or not _one_dtype(input, weight, bias):
        return None
    x, dx = mode.parts(input)
    if dx is None:
        return None
    y, mean, rstd = torch.native_layer_norm(x, normalized_shape, weight, bias, eps)
    dy, _, _ = torch.ops.aten.native_layer_norm_backward.default(
        *(dx.contiguous(), x.contiguous(), normalized_shape, mean, rstd),
        *(None, None, [True, False, False]),
    )
    return mode.dual(y, dy if weight is None else dy.mul_(weight))


def _batch_norm(
    mode: OneTangent,
    fun: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Batch norm in evaluation mode, which is affine; in training mode PyTorch's rule is used."""
    if training or not mode.fixes((running_mean, running_var, weight, bias)):
        return None
    x, dx = mode.parts(input)
    if dx is None:
        return None
    y = fun(x, running_mean, running_var, weight, bias, eps=eps)
    zero = torch.zeros_like(running_mean)
    return mode.dual(y, fun(dx, zero, running_var, weight, None, eps=eps))


def _softmax(
    mode: OneTangent,
    fun: Any,
    input: Any,
    dim: Any = None,
    _stacklevel: Any = 3,
    dtype: Any = None,
    **others: Any,
) -> Any:
    """Softmax: its Jacobian, diag(p) - p p^T, is symmetric, so its pullback pushes forward."""
    if others or type(_stacklevel) is not int:  # at its place may stand a dtype
        return None
    if type(dim) is not int or dtype is not None or not _one_dtype(input):
        return None
    x, dx = mode.parts(input)
    if dx is None:
        return None
    y = torch.softmax(x, dim)
    return mode.dual(y, upstream.softmax_pullback(dx, y, dim, y.dtype))


def _dropout(
    mode: OneTangent,
    fun: Any,
    input: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """Dropout that drops nothing: the input itself, as PyTorch returns it."""
    return None if training and p > 0 else input


def _one_dtype(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all operands have one dtype and autocast is disabled."""
    dtype = x.dtype
    for other in others:
        if other is not None and other.dtype != dtype:
            return False
    return not upstream.is_any_autocast_enabled()


_MANY = 2**18  # below it joining the inputs costs more than it saves
_PLAIN, _STRIDED = frozenset((Tensor, torch.nn.Parameter)), torch.strided

_ALIKE: dict[Any, tuple[Any, ...]] = {
    _as_it_is: (
        *(torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid, torch.relu, Tensor.relu),
        *(functional.gelu, torch.exp, Tensor.exp, torch.sin, torch.cos),
        *(Tensor.reshape, Tensor.view, Tensor.transpose, Tensor.contiguous),
    ),
    _linear: (functional.linear,),
    _convolution: (
        *(functional.conv1d, functional.conv2d, functional.conv3d),
        *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
    ),
    _product: (
        *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
        *(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
    ),
    _quotient: (torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide),
    _sum(1, 1): (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    _sum(1, -1): (torch.sub, Tensor.sub, Tensor.__sub__),
    _sum(-1, 1): (torch.rsub, Tensor.__rsub__),
    _layer_norm: (functional.layer_norm,),
    _batch_norm: (functional.batch_norm,),
    _softmax: (functional.softmax, torch.softmax, Tensor.softmax),
    _dropout: (functional.dropout,),
}
_RULES = {fun: rule for rule, those in _ALIKE.items() for fun in those}
