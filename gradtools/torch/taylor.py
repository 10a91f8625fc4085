"""Taylor mode in PyTorch: a function mode on tensors with Taylor coefficients.

A tensor that depends on the inputs has its series as an attribute. An operation on it has a rule
here, or is differentiated by nested forward mode (`Jets.general`). Some operations are invisible to
a function mode: a `torch.autograd.Function`, a gradient that f takes, an in-place write. Their
results have no series, although autograd's graph leads from them to the inputs. If there is such a
tensor, f is differentiated by nested forward mode as a whole.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.rules import replaced_at
from gradtools.taylor import LOGISTIC, SLOPES, Algebra, Laplacians, Series, polynomials, powers
from gradtools.torch import _upstream as upstream
from gradtools.torch import engines
from gradtools.torch.autograd_graph import graph_of, node_of
from gradtools.torch.compiling import as_written
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.open_derivatives import ReadsElsewhere, caller_of, note_taken
from gradtools.torch.plain_programs import programs
from gradtools.torch.plain_programs.rows import is_custom_operator
from gradtools.torch.randomness import Randomness
from gradtools.torch.rerunning import changes_in_place, name_of

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_SERIES = "gradtools_series"


class _NotSeen(Exception):
    """f has an operation that the mode cannot follow."""


def carry_series(
    fun: Fun, moved: Sequence[Series], algebra: Algebra
) -> tuple[list[Series], list[Any]]:
    """fun's outputs with their series, and its extras."""
    places: list[list[bool]] = []

    def flat(*aliases: Tensor) -> tuple[list[Tensor], list[Any]]:
        pairs = zip(aliases, moved, strict=True)
        # Autograd cannot save terms that were made in inference mode.
        saveable = lambda t: t.clone() if t is not None and t.is_inference() else t
        here = [Series(x, tuple(map(saveable, s.terms))) for x, s in pairs]
        start, mode = (
            Randomness.everywhere({x.device.type for x in aliases}),
            _Carrying(algebra, here),
        )
        try:
            with as_written(), mode, elsewhere:
                outs, extras = fun(*aliases)
            mode.refuse_unseen(outs)
            ys = [getattr(y, _SERIES, None) or Series(y, (None,) * algebra.order) for y in outs]
        except _NotSeen:

            def from_start(*xs: Tensor) -> Any:  # so that its draws repeat
                start.restore()
                return fun(*xs)

            ys, extras = algebra.general(from_start, here, in_loop=True)
        finally:
            mode.forget()
        places[:] = [[t is not None for t in y.terms] for y in ys]
        return [x for y in ys for x in (y.primal, *y.terms) if x is not None], extras

    flat.caller = caller_of(fun)  # type: ignore[attr-defined]
    leaves = [x.primal for x in moved]
    elsewhere = ReadsElsewhere(leaves)
    result = engines.vjp(flat, leaves, groups=None, once=True)
    if elsewhere.found:
        engines.refuse_lost_along(fun, leaves)
    left = iter(result.outs)
    terms_of = lambda places: tuple([next(left) if there else None for there in places])
    series = [Series(next(left), terms_of(each)) for each in places]
    terms = [t for y in series for t in y.terms[algebra.returned]]
    note_taken([y.primal for y in series], terms, leaves, leaves, torch.is_grad_enabled())
    return series, list(result.extras)


class _Carrying(TorchFunctionMode):
    """The function mode: operations on tensors with a series return tensors with a series."""

    def __init__(self, algebra: Algebra, inputs: Sequence[Series]) -> None:
        super().__init__()
        self.algebra = algebra
        self._inputs = inputs
        self._depth = len(upstream.get_interpreter_stack() or ())
        self._nodes = {node_of(x.primal) for x in inputs} - {None}
        self._known: dict[int, Tensor] = {}  # tensors that do not depend on the inputs
        self._carriers: list[weakref.ref[Tensor]] = []  # all others, which have a series
        self._inside: Any = None

    def __enter__(self) -> _Carrying:
        for x in self._inputs:
            setattr(x.primal, _SERIES, x)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for x in self._inputs:
            x.primal.__dict__.pop(_SERIES, None)

    def carrying(self, y: Tensor, terms: Sequence[Tensor | None]) -> Tensor:
        """y, with these Taylor coefficients attached."""
        if any(t is not None for t in terms):
            setattr(y, _SERIES, Series(y, tuple(terms)))
            self._carriers.append(weakref.ref(y))
        return y

    def forget(self) -> None:
        """Removes all series. What the graph of its own series saved would never be freed."""
        for carrier in self._carriers:
            if (y := carrier()) is not None:
                y.__dict__.pop(_SERIES, None)

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        raw = getattr(fun, "__name__", "")
        if fun in _DIFFERENTIATE or len(upstream.get_interpreter_stack() or ()) != self._depth:
            raise _NotSeen
        if not torch.is_grad_enabled():
            return fun(*args, **kwargs)
        if type(fun) is FunctionType and fun is not self._inside:  # a Python function of PyTorch
            before, self._inside = self._inside, fun
            try:
                with self.again():
                    return upstream.redispatch_function(fun, (), args, kwargs)
            finally:
                self._inside = before
        leaves, treedef = upstream.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if hasattr(x, _SERIES)]
        self.refuse_unseen(leaves)
        name = "" if is_custom_operator(fun) else name_of(fun)
        attribute = raw == "__get__" and name not in _VIEWS
        if not places or attribute or name in _QUESTIONS or raw.startswith("is_"):
            return fun(*args, **kwargs)
        if changes_in_place(raw, kwargs) or name in _HOOKS:
            raise _NotSeen
        call = _Operation(self, fun, leaves, treedef, places)
        rule = _RULES.get(name)
        result = None if rule is None else rule(call, *args, **kwargs)
        return call.any() if result is None else result

    def refuse_unseen(self, xs: Sequence[Any]) -> None:
        """Raises if one of these depends on the inputs, but has no series."""
        for x in xs:
            if not isinstance(x, Tensor) or not x.requires_grad or hasattr(x, _SERIES):
                continue
            if x.grad_fn is None or id(x) in self._known:
                continue
            if not self._nodes.isdisjoint(graph_of([x])):
                raise _NotSeen
            self._known[id(x)] = x

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context that re-enters this mode while it handles a call."""
        TorchFunctionMode.__enter__(self)
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)


class _Operation:
    """One call of a function of PyTorch, some of whose operands have a series."""

    def __init__(
        self, mode: _Carrying, fun: Any, leaves: list[Any], treedef: Any, places: list[int]
    ) -> None:
        self.mode, self.fun, self.algebra = mode, fun, mode.algebra
        self._leaves, self._treedef, self._places = leaves, treedef, places
        self.moved: list[Series] = [getattr(leaves[i], _SERIES) for i in places]

    def at(self, *values: Tensor) -> Any:
        """The call with other values of the operands that have a series."""
        filled = replaced_at(self._leaves, self._places, values)
        args, kwargs = upstream.tree_unflatten(filled, self._treedef)
        return self.fun(*args, **kwargs)

    def elementwise(self, y: Tensor, slopes: Sequence[Any]) -> Tensor:
        """y = f(x) for an elementwise f of the one operand with a series; slopes: f', f'', ..."""
        return self.mode.carrying(y, self.algebra.elementwise(slopes, self.moved[0]))

    def linear(
        self, f: Callable[..., Any] | None = None, leading: bool = False, y: Tensor | None = None
    ) -> Any:
        """The result y of a call that is affine in its operands with series; f: its linear part."""
        result = self.at(*[x.primal for x in self.moved]) if y is None else y
        part = self.at if f is None else f
        flat = lambda *xs: [y for y in upstream.tree_leaves(part(*xs)) if isinstance(y, Tensor)]
        ys = [y for y in upstream.tree_leaves(result) if isinstance(y, Tensor)]
        if all(map(is_inexact, ys)):
            for y, terms in zip(ys, self.algebra.linear(flat, self.moved, leading), strict=False):
                self.mode.carrying(y, terms)
        return result

    def any(self) -> Any:
        """The result of any call, by nested forward mode."""
        shape: list[Any] = []

        def fun(*values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            ys, outdef = upstream.tree_flatten(self.at(*values))
            kinds = [isinstance(y, Tensor) and (1 + is_inexact(y)) for y in ys]
            shape[:] = [outdef, kinds, ys]
            pairs = list(zip(ys, kinds, strict=True))
            return [y for y, k in pairs if k == 2], [y for y, k in pairs if k == 1]

        start = Randomness.everywhere({x.primal.device.type for x in self.moved})
        rows = isinstance(self.algebra, Laplacians)
        try:
            outs, extras = self.algebra.general(fun, self.moved)
        except RuntimeError as error:
            if not rows:
                raise
            raise _NotSeen from error  # vmap does not support it, nested forward mode does
        if rows and start.advanced().states:
            raise _NotSeen  # its evaluations drew different numbers
        outdef, kinds, ys = shape
        left, rest = iter(outs), iter(extras)
        result = []
        for kind, y in zip(kinds, ys, strict=True):
            series = next(left) if kind == 2 else None
            if series is not None:
                result.append(self.mode.carrying(series.primal, series.terms))
            else:
                result.append(next(rest) if kind == 1 else y)
        return upstream.tree_unflatten(result, outdef)


def _series(x: Any) -> Series | None:
    return getattr(x, _SERIES, None)


# --- rules: each returns the result, or None to use nested forward mode --------------------------


def _sum(sign: int) -> Any:
    def rule(call: _Operation, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 2:
            return None
        a, b = map(_series, args)
        if a and b:
            return call.linear() if len(call.moved) == 2 else None
        y = call.at(*[x.primal for x in call.moved])

        def broadcast(term: Tensor) -> Tensor:
            term = term if a or sign > 0 else -term
            term = term if term.shape == y.shape else term.expand(y.shape)
            return term.to(y.dtype)

        return call.linear(broadcast, y=y)

    return rule


def _product(call: _Operation, *args: Any, **kwargs: Any) -> Any:
    """Operations of two operands that are linear in each."""
    if kwargs or len(args) != 2:
        return None
    a, b = args
    x, y = _series(a), _series(b)
    if x is None or y is None:
        ranks = [c.dim() if isinstance(c, Tensor) else 0 for c in args]
        scaled = name_of(call.fun) in _SCALES
        leading = ranks[1 if x is None else 0] >= ranks[0 if x is None else 1]
        # A new leading axis is a batch axis of matrices if the operands with series are left.
        stacked = x is not None and ranks[1] == 2
        return call.linear(leading=leading if scaled else stacked)
    leading = a.dim() == b.dim() and name_of(call.fun) in _SCALES
    terms = call.algebra.product(call.fun, x, y, leading)
    return call.mode.carrying(call.fun(x.primal, y.primal), terms)


def _quotient(call: _Operation, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2:
        return None
    a, b = args
    if _series(b) is None:
        return call.linear(leading=not isinstance(b, Tensor))
    with call.mode.again():
        return a * torch.reciprocal(b)


def _layer(call: _Operation, x: Any, weight: Any, bias: Any = None, *more: Any) -> Any:
    """A linear or convolutional layer."""
    if _series(x) is None or len(call.moved) > 1:
        return None
    part = lambda t: call.fun(t, weight, None, *more)
    return call.linear(part, leading=call.fun is functional.linear)


def _elementwise(call: _Operation, x: Any, *args: Any, **kwargs: Any) -> Any:
    if _series(x) is None or len(call.moved) > 1 or x.is_complex():
        return None
    slopes: list[Tensor] = []
    fun: Fun = lambda x: ([call.at(x)], [])
    ones = torch.ones_like(x)
    for _ in range(call.algebra.order):
        fun = partial(lambda f, x: (engines.jvp(f, [x], [ones])[2], []), fun)
        slopes.append(fun(x)[0][0])
    return call.elementwise(call.at(x), slopes)


def _known_slopes(slopes: Callable[[Any, Tensor, Tensor, int], list[Any]]) -> Any:
    """Elementwise functions of one operand, with closed derivatives in x and y."""

    def rule(call: _Operation, x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return None
        y = call.at(x)
        return call.elementwise(y, slopes(torch, x, y, call.algebra.order))

    return rule


def _power(call: _Operation, x: Any, p: Any = 2, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return None
    if isinstance(x, int | float) and x > 0:
        y, rate = call.at(p), math.log(x)
        return call.elementwise(y, [y * rate ** (k + 1) for k in range(call.algebra.order)])
    if not isinstance(p, int | float) or _series(x) is None:
        return None
    return call.elementwise(call.at(x), powers(x, float(p), call.algebra.order))


def _softplus(call: _Operation, x: Any, beta: Any = 1, threshold: Any = 20, **kwargs: Any) -> Any:
    """Derivatives by the logistic function; the identity above PyTorch's threshold."""
    if kwargs or _series(x) is None:
        return None
    scaled = beta * x
    s, order = torch.sigmoid(scaled), call.algebra.order
    higher = polynomials(s, LOGISTIC, order - 1)
    low = scaled <= threshold
    slopes = [torch.where(low, s, 1), *[low * h * beta**k for k, h in enumerate(higher, 1)]]
    return call.elementwise(call.at(x), slopes)


def _clamped(call: _Operation, x: Any, min: Any = None, max: Any = None) -> Any:
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        return None
    inside = torch.ones_like(x, dtype=torch.bool)
    inside = inside if min is None else inside & (x >= min)
    inside = inside if max is None else inside & (x <= max)
    return call.elementwise(call.at(x), [inside.to(x.dtype), *[0.0] * (call.algebra.order - 1)])


def _where(call: _Operation, condition: Any, *branches: Any, **kwargs: Any) -> Any:
    """torch.where: linear in its branches; a branch without a series has zero coefficients."""
    if kwargs or len(branches) != 2:
        return None
    is_mask = lambda x: isinstance(x, Tensor) and x.dtype == torch.bool
    if not is_mask(condition) and is_mask(branches[0]):
        condition, branches = branches[0], (condition, branches[1])  # the method
    zero = [torch.zeros_like(b) if isinstance(b, Tensor) else 0.0 for b in branches]
    moves = [_series(b) is not None for b in branches]

    def part(*terms: Tensor) -> Tensor:
        left = iter(terms)
        chosen = [next(left) if m else z for m, z in zip(moves, zero, strict=True)]
        result: Tensor = torch.where(condition, chosen[0], chosen[1])
        return result

    return call.linear(part)


def _masked_fill(call: _Operation, x: Any, mask: Any, value: Any) -> Any:
    if _series(x) is None or len(call.moved) > 1:
        return None
    return call.linear(lambda t: t.masked_fill(mask, 0))


def _einsum(call: _Operation, equation: Any, *operands: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(equation, str):
        return None
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        (operands,) = operands
    if len(call.moved) == 1:
        return call.linear()
    if len(operands) != 2:
        return None
    x, y = call.moved
    terms = call.algebra.product(lambda a, b: torch.einsum(equation, a, b), x, y, False)
    return call.mode.carrying(call.at(x.primal, y.primal), terms)


# --- compositions, run inside of the mode --------------------------------------------------------


def _composed(program: Callable[..., Any]) -> Any:
    def rule(call: _Operation, *args: Any, **kwargs: Any) -> Any:
        with call.mode.again():
            return program(*args, **kwargs)

    return rule


def _absolute(call: _Operation, x: Any, *args: Any, **kwargs: Any) -> Any:
    if x.is_complex() or args or kwargs:
        return None
    with call.mode.again():
        return x * torch.sign(x)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "none":
        return x * (torch.erf(x * math.sqrt(0.5)) + 1) * 0.5
    return x * (torch.tanh((x + x**3 * 0.044715) * math.sqrt(2 / math.pi)) + 1) * 0.5


def _vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if ord not in (2, None) or dtype is not None or x.is_complex():
        return None
    square = (x * x).sum(dim, keepdim)
    some = square != 0  # the derivative at zero is zero, as PyTorch's
    return torch.where(some, torch.sqrt(torch.where(some, square, 1)), 0)


def _softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    x = x if dtype is None else x.to(dtype)
    z = (x - x.detach().amax(dim, True)).exp()
    return z / z.sum(dim, True)


def _log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    x = x if dtype is None else x.to(dtype)
    z = x - x.detach().amax(dim, True)
    return z - z.exp().sum(dim, True).log()


def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    top = x.detach().amax(dim, True)
    top = torch.where(top.isfinite(), top, 0)
    z = (x - top).exp().sum(dim, True).log() + top
    return z if keepdim else z.squeeze(dim)


def _dropout(x: Any, p: float, training: bool) -> Any:
    return x * torch.dropout(torch.ones_like(x.detach()), p, True) if training else x


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *how: Any
) -> Any:
    if training or mean is None:
        return programs.batch_norm(x, weight, bias, mean, variance, True, *how)
    return programs.batch_norm_by_statistics(x, weight, bias, mean, variance, how[1])


def _attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p or enable_gqa:
        raise _NotSeen
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return programs.attention_weights(q, k, attn_mask, is_causal, scale) @ v


_DIFFERENTIATE = {
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    upstream.custom_function_call,
}
_HOOKS = frozenset(("register_hook", "retain_grad", "register_post_accumulate_grad_hook"))
_QUESTIONS = frozenset(
    "detach size dim numel ndimension nelement stride len bool int float complex item tolist numpy "
    "is_floating_point is_complex is_contiguous element_size data_ptr get_device format repr str "
    "hash storage_offset has_names zeros_like ones_like empty_like full_like rand_like randn_like "
    "new_zeros new_ones new_empty new_full new_tensor eq ne lt le gt ge isnan isinf isfinite "
    "isposinf isneginf argmax argmin argsort sign floor ceil round trunc nonzero count_nonzero "
    "requires_grad_ allclose equal is_same_size result_type can_cast broadcast_shapes "
    "unpack_dual".split()
)
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")
_SCALES = frozenset(("mul", "rmul", "multiply"))
_ALIKE: dict[Any, str] = {
    lambda call, *args, **kwargs: call.linear(): (
        "cat concat concatenate stack hstack vstack neg negative reshape view reshape_as view_as "
        "transpose swapaxes permute t flatten unflatten unsqueeze squeeze expand expand_as "
        "broadcast_to movedim moveaxis sum mean cumsum select narrow flip roll tile repeat "
        "diagonal diag diag_embed tril triu trace chunk split unbind tensor_split real imag conj "
        "clone contiguous to double float half bfloat16 type type_as view_as_real "
        "view_as_complex resolve_conj resolve_neg unfold T mT H mH"
    ),
    # Linear in the first operand, if the others are constant.
    lambda call, x, *args, **kwargs: (
        call.linear() if len(call.moved) == 1 and _series(x) else None
    ): "getitem index_select gather take_along_dim masked_select",
    _sum(1): "add radd",
    _sum(-1): "sub subtract",
    _product: "mul rmul multiply matmul rmatmul mm bmm mv dot",
    _quotient: "div truediv true_divide divide",
    _layer: "linear conv1d conv2d conv3d",
    _elementwise: (
        "leaky_relu elu selu celu mish logsigmoid hardtanh erfc sinh cosh tan asin acos atan "
        "asinh acosh atanh log2 log10 digamma lgamma"
    ),
    _absolute: "abs absolute",
    _power: "pow",
    _softplus: "softplus",
    _clamped: "clamp clip clamp_min",
    lambda call, x, max: _clamped(call, x, None, max): "clamp_max",
    _where: "where",
    _masked_fill: "masked_fill",
    _einsum: "einsum",
    _known_slopes(lambda _, x, y, n: [(x > 0).to(x.dtype), *[0.0] * (n - 1)]): "relu",
    **{_known_slopes(f): {"logistic": "sigmoid"}.get(name, name) for name, f in SLOPES.items()},
    _composed(lambda x, y, *, alpha=1: (-x if alpha == 1 else x * -alpha) + y): "rsub",
    _composed(_gelu): "gelu",
    _composed(programs.silu): "silu",
    _composed(lambda start, end, weight: start + (end - start) * weight): "lerp",
    _composed(_vector_norm): "linalg_vector_norm",
    _composed(
        lambda x, ord=None, *args, **kw: _vector_norm(x, ord, *args, **kw) if ord is None else None
    ): "linalg_norm",
    _composed(_softmax): "softmax",
    _composed(_log_softmax): "log_softmax",
    _composed(_logsumexp): "logsumexp",
    _composed(programs.layer_norm): "layer_norm",
    _composed(_batch_norm): "batch_norm",
    _composed(_dropout): "dropout",
    _composed(_attention): "scaled_dot_product_attention",
}
_RULES = {name: rule for rule, names in _ALIKE.items() for name in names.split()}
