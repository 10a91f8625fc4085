"""Sparsity detection: which output entries may depend on which input entries, by an FX graph.

The graph is a functionalized trace of one run in ATen operations (`make_fx`). It is valid for the
branches that this run took, so each call traces again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gradtools.errors import GradtoolsError
from gradtools.sparse import entry_dependence as e
from gradtools.sparse.entry_dependence import AbstractArray, Entries
from gradtools.torch.functorch_wrappers import is_mapped, is_wrapped
from gradtools.torch.known_errors import NO_FUNCTIONALIZED_RULE, says
from gradtools.torch.rerunning import put_back

Tensor = torch.Tensor
_MOVING = frozenset(
    """
    alias as_strided cat clone constant_pad_nd contiguous diag_embed diagonal expand flip gather
    im2col index index_put index_select lift_fresh_copy masked_scatter permute pixel_shuffle
    reflection_pad1d reflection_pad2d repeat replication_pad1d replication_pad2d reshape
    reshape_alias roll rot90 scatter select select_backward select_scatter slice slice_backward
    slice_scatter split split_with_sizes squeeze stack t take transpose tril triu unbind unfold
    unsafe_view unsqueeze view
    """.split()
)
_REDUCING = {"sum", "mean", "amax", "amin", "prod", "logsumexp", "linalg_vector_norm", "norm"}
_REDUCING |= {"var", "std", "max", "min", "median"}
_ALONG = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "softmax", "log_softmax"}
_ALONG_OPERANDS = {"softmax_backward_data": 2, "log_softmax_backward_data": 2}
_FILLED = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_COPIES = {"to", "mul", "add"}


def detected(fun: Any, x: Tensor, only: Callable[..., Tensor]) -> tuple[Any, tuple[int, ...]]:
    """The pattern of fun's Jacobian at x, a boolean CSR matrix, and the shape of its output.

    only: Returns the only one of fun's outputs, or raises.
    """
    if is_wrapped(x) and not is_mapped(x):  # `make_fx` would take x for a constant
        raise GradtoolsError(
            "sparsity='detect': f's argument belongs to a transform of torch.func, inside of which "
            "PyTorch cannot trace f. Give the pattern, or differentiate by gt.grad, gt.vjp and "
            "their like."
        )
    run = lambda x: only(fun(x)[0])
    try:
        with put_back(fun, [x]), torch.enable_grad():
            try:
                graph = _without_writing(run, x)
            except RuntimeError as error:
                if not says(error, NO_FUNCTIONALIZED_RULE):
                    raise
                graph = _without_writing(make_fx(run)(x.detach().clone()), x)
    except GradtoolsError:
        raise
    except Exception as error:
        raise GradtoolsError(
            "sparsity='detect': f cannot be read as a graph of PyTorch's operations; give the "
            f"pattern. PyTorch says: {error}"
        ) from error
    out = _EntryReader(graph).of(x)
    return out.pattern(x.numel()), out.shape


def _without_writing(run: Callable[[Tensor], Tensor], x: Tensor) -> torch.fx.GraphModule:
    return make_fx(torch.func.functionalize(run, remove="mutations_and_views"))(x.detach().clone())


class _EntryReader(torch.fx.Interpreter):
    """An interpreter that propagates dependences; evaluates nodes that are constant."""

    def of(self, x: Tensor) -> Any:
        return self.run(AbstractArray(x.shape, e.identity(x.shape)))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        ins = [v for v in _flat((args, kwargs)) if isinstance(v, AbstractArray)]
        draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if not draws and all(v.entries is None and v.value is not None for v in ins):
            return _wrapped(target(*_opened(args), **_opened(kwargs)))
        shown = self.meta
        if shown is None:  # an assertion
            return None
        active = [v.entries for v in ins if v.entries is not None]
        return _results(target, args, kwargs, active, shown)

    def run_node(self, n: Any) -> Any:
        self.meta = n.meta.get("val", n.meta.get("tensor_meta"))
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _wrapped(super().get_attr(target, args, kwargs))

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return args[0]


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        return [x for item in tree for x in _flat(item)]
    return [tree]


def _mapped(change: Callable[[AbstractArray], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _mapped(change, v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(change, v) for v in tree])
    return change(tree) if isinstance(tree, AbstractArray) else tree


def _opened(tree: Any) -> Any:
    return _mapped(lambda v: v.value, tree)


def _wrapped(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(map(_wrapped, result))
    return AbstractArray(result.shape, None, result) if isinstance(result, Tensor) else result


def _results(target: Any, args: Any, kwargs: Any, active: list[Entries], shown: Any) -> Any:
    """The dependences of an operation's results."""
    outs = list(shown) if isinstance(shown, list | tuple) else [shown]
    shapes = [tuple(y.shape) for y in outs]
    exact = [not (y.dtype.is_floating_point or y.dtype.is_complex) for y in outs]
    name = _name(target)
    if name in _FILLED:
        return AbstractArray(
            shapes[0], None, target(torch.empty(args[0].shape), *args[1:], **kwargs)
        )
    if all(exact) or not active:  # an integer has no derivative
        found: list[Any] = [None for _ in outs]
    else:
        found = _entries(target, args, kwargs, active, shapes)
    pairs = zip(shapes, found, exact, strict=True)
    values = [AbstractArray(shape, None if whole else entries) for shape, entries, whole in pairs]
    return values if isinstance(shown, list | tuple) else values[0]


def _name(target: Any) -> str:
    """An operation's name without its overload and without the suffix `_copy`."""
    return str(getattr(target, "__name__", target)).split(".")[0].removesuffix("_copy").strip("_")


def _entries(
    target: Any, args: Any, kwargs: Any, active: list[Entries], shapes: list[tuple[int, ...]]
) -> list[Entries]:
    name = _name(target)
    if name == "detach":
        return [None for _ in shapes]  # type: ignore[misc]
    if name in _COPIES or torch.Tag.pointwise in getattr(target, "tags", ()):
        return [e.entrywise(shape, active) for shape in shapes]
    make = _MADE.get(name)
    made = make(target, args, kwargs, active, shapes) if make else None
    return made or [e.everything(shape, active) for shape in shapes]


# --- transfer functions of the operations


def _moved(target: Any, args: Any, kwargs: Any, active: Any, shapes: Any) -> list[Entries] | None:
    """The operation itself, applied to the indices of its operands' entries."""
    name = _name(target)
    if name == "index_put" and ((len(args) > 3 and args[3]) or kwargs.get("accumulate")):
        return None
    if name == "scatter" and (len(args) > 4 or "reduce" in kwargs):
        return None
    ins = [v for v in _flat((args, kwargs)) if isinstance(v, AbstractArray)]
    start, order = 0, list[Entries]()
    numbers: dict[int, Tensor | None] = {}
    for v in ins:
        if v.entries is not None:
            numbers[id(v)] = torch.from_numpy(e.index_array(v.shape, start))
            start += math.prod(v.shape)
            order.append(v.entries)
        elif v.value is None:
            return None
        elif name in ("cat", "stack") or v.value.is_floating_point() or v.value.is_complex():
            numbers[id(v)] = torch.full(v.shape, -1, dtype=torch.int64)
        else:
            numbers[id(v)] = v.value.cpu()
    args, kwargs = (_mapped(lambda v: numbers[id(v)], tree) for tree in (args, kwargs))
    if name == "constant_pad_nd":
        args = (*args[:2], -1)
    if name == "scatter" and not isinstance(args[3], Tensor):
        args = (*args[:3], -1)
    if name in ("tril", "triu", "select_backward", "slice_backward", "diag_embed", "im2col"):
        run = lambda: _shifted(target, args, kwargs)  # they fill with 0
    else:
        run = lambda: target(*args, **kwargs)
    outs = run()
    outs = outs if isinstance(outs, list | tuple) else [outs]
    return [e.moved(order, y.numpy()) for y in outs]


def _shifted(target: Any, args: Any, kwargs: Any) -> Any:
    args = (args[0] + 1, *args[1:])
    if _name(target) == "im2col":
        return (target(args[0].to(torch.float64), *args[1:], **kwargs)).long() - 1
    return target(*args, **kwargs) - 1


def _axes(args: Any, kwargs: Any, ndim: int) -> list[int]:
    for given in (*args[1:], kwargs.get("dim")):
        if isinstance(given, list | tuple) and given and all(type(d) is int for d in given):
            return [*given]
    return [*range(ndim)]


def _reduced(target: Any, args: Any, kwargs: Any, active: Any, shapes: Any) -> list[Entries] | None:
    x = active[0]
    overload = str(target).rpartition(".")[2]
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if type(axis) is int and overload != "default":
        axes = [axis]
    elif overload in ("", "default") and target.__name__.startswith(
        ("max", "min", "prod", "median")
    ):
        axes = [*range(len(x.shape))]
    else:
        axes = _axes(args, kwargs, len(x.shape))
    found = e.over_axes(x, axes)
    if math.prod(found.shape) != math.prod(shapes[0]):
        return None
    return [Entries(shape, found.matrix) for shape in shapes]


def _lines(target: Any, args: Any, kwargs: Any, active: Any, shapes: Any) -> list[Entries] | None:
    place = _ALONG_OPERANDS.get(_name(target), 1)
    axis = args[place] if len(args) > place else kwargs.get("dim")
    if type(axis) is not int or not shapes[0]:
        return None
    return [e.along(e.entrywise(shapes[0], active), [axis]) for _ in shapes]


def _product(target: Any, args: Any, kwargs: Any, active: Any, shapes: Any) -> list[Entries] | None:
    name = _name(target)
    added = [args[0]] if name in ("addmm", "baddbmm", "addmv") else []
    a, b = args[len(added) : len(added) + 2]
    batch, width = (a.shape[0] if len(a.shape) == 3 else 1), a.shape[-1]
    rows = a.shape[-2] if len(a.shape) > 1 else 1
    cols = b.shape[-1] if len(b.shape) > 1 else 1
    left, right = e.index_array((batch, rows, width)), e.index_array((batch, width, cols))
    matrix = e.product((a, b), (left, right.swapaxes(1, 2)), _nonzero)
    found = [v.entries for v in added if v.entries is not None]
    if matrix is not None:
        found.append(Entries(shapes[0], matrix))
    return [e.entrywise(shapes[0], found)]


def _nonzero(x: Tensor) -> np.ndarray:
    """Where a constant, dense or sparse, is not zero."""
    there: np.ndarray = (x.detach().to_dense() != 0).cpu().numpy()
    return there


def _convolved(
    target: Any, args: Any, kwargs: Any, active: Any, shapes: Any
) -> list[Entries] | None:
    image, kernel, bias, stride, padding, dilation, transposed, _, groups = args
    flat = len(kernel.shape) == 3
    constants = kernel.entries is None and (bias is None or bias.entries is None)
    if not constants or transposed or len(kernel.shape) > 4 or image.entries is None:
        return None
    index = torch.from_numpy(e.index_array(image.shape)).to(torch.float64) + 1
    size, strides, pads, steps = kernel.shape[2:], stride, padding, dilation
    if flat:
        index = index.unsqueeze(2)
        size, strides, pads, steps = (1, *size), (1, *strides), (0, *pads), (1, *steps)
    patches = torch.nn.functional.unfold(
        index, tuple(size), tuple(steps), tuple(pads), tuple(strides)
    )
    at = patches.round().long().numpy() - 1
    n, out = image.shape[0], kernel.shape[0]
    where = None
    if kernel.value is not None:
        where = _nonzero(kernel.value).reshape(out, -1)
    made = e.windows(image.entries, at.reshape(n, groups, at.shape[1] // groups, -1), where, out)
    return [Entries(shapes[0], made.matrix)]


_MADE: dict[str, Any] = {
    **dict.fromkeys(_MOVING, _moved),
    **dict.fromkeys(_REDUCING, _reduced),
    **dict.fromkeys((*_ALONG, *_ALONG_OPERANDS), _lines),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"), _product),
    "convolution": _convolved,
}


# --- sparse arrays


def sparse_array(index: np.ndarray, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse COO tensor: one row of `index` for each axis, sorted, each entry once."""
    if is_mapped(values):
        raise GradtoolsError(
            "jacobian, hessian: under vmap there is no sparse result, for PyTorch batches no "
            "sparse tensors. Call it for each example in a loop, or leave sparsity= out."
        )
    at = torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(values.device)
    return torch.sparse_coo_tensor(
        at, values, tuple(shape), is_coalesced=True, check_invariants=False
    )


def summed(groups: np.ndarray, terms: Tensor, like: Tensor) -> Tensor:
    """The sums of terms by group, a tensor like `like`."""
    at = torch.from_numpy(groups.astype(np.int64)).to(terms.device)
    return torch.zeros_like(like).index_add(0, at, terms)
