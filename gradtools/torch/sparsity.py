"""Sparsity detection: which output entries may depend on which input entries, by an FX graph.

The graph is a functionalized trace of one run in ATen operations (`make_fx`). It is valid for the
branches that this run took, so each call traces again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gradtools.errors import GradtoolsError
from gradtools.sparse import entry_dependence as e
from gradtools.sparse.entry_dependence import AbstractArray, Entries
from gradtools.torch.functorch_wrappers import is_mapped, is_wrapped
from gradtools.torch.known_errors import NO_FUNCTIONALIZED_RULE, says
from gradtools.torch.plain_programs.rows import is_custom_operator
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
    out = _EntryReader(graph).run(AbstractArray(x.shape, e.identity(x.shape)))
    return out.pattern(x.numel()), out.shape


def _without_writing(run: Callable[[Tensor], Tensor], x: Tensor) -> torch.fx.GraphModule:
    return make_fx(torch.func.functionalize(run, remove="mutations_and_views"))(x.detach().clone())


class _EntryReader(torch.fx.Interpreter):
    """An interpreter that propagates dependences; evaluates nodes that are constant."""

    def run_node(self, n: Any) -> Any:
        self.meta = n.meta.get("val", n.meta.get("tensor_meta"))
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        ins = _operands(args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if not draws and all(v.entries is None and v.value is not None for v in ins):
            args, kwargs = (_mapped(lambda v: v.value, tree) for tree in (args, kwargs))
            return _wrapped(target(*args, **kwargs))
        if self.meta is None:  # an assertion
            return None
        several = isinstance(self.meta, list | tuple)
        outs = list(self.meta) if several else [self.meta]
        shapes = [tuple(y.shape) for y in outs]
        # Without the overload and the suffix `_copy`.
        name = str(getattr(target, "__name__", target)).split(".")[0]
        name = "" if is_custom_operator(target) else name.removesuffix("_copy").strip("_")
        if name in _FILLED:
            full = target(torch.empty(args[0].shape), *args[1:], **kwargs)
            return AbstractArray(shapes[0], None, full)
        active = [v.entries for v in ins if v.entries is not None]
        call = _EntryOperation(target, name, args, kwargs, active, shapes)
        # An integer has no derivative.
        smooth = [y.dtype.is_floating_point or y.dtype.is_complex for y in outs]
        entries: list[Any] = call.entries() if active and any(smooth) else [None for _ in outs]
        triples = zip(shapes, entries, smooth, strict=True)
        values = [AbstractArray(shape, of if there else None) for shape, of, there in triples]
        return values if several else values[0]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _wrapped(super().get_attr(target, args, kwargs))

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return args[0]


def _operands(args: Any, kwargs: Any) -> list[AbstractArray]:
    """The arrays among the arguments, in their order."""
    result: list[AbstractArray] = []
    _mapped(result.append, (args, kwargs))
    return result


def _mapped(change: Callable[[AbstractArray], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _mapped(change, v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(change, v) for v in tree])
    return change(tree) if isinstance(tree, AbstractArray) else tree


def _wrapped(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(map(_wrapped, result))
    return AbstractArray(result.shape, None, result) if isinstance(result, Tensor) else result


class _EntryOperation(NamedTuple):
    """One operation of the graph, some of whose operands depend on the input."""

    target: Any
    name: str
    args: Any
    kwargs: Any
    active: list[Entries]  # the dependences of those operands
    shapes: list[tuple[int, ...]]  # the shapes of the results

    def entries(self) -> list[Any]:
        """The dependences of the results."""
        if self.name == "detach":
            return [None for _ in self.shapes]
        if self.name in _COPIES or torch.Tag.pointwise in getattr(self.target, "tags", ()):
            return [e.entrywise(shape, self.active) for shape in self.shapes]
        transfer = _TRANSFERS.get(self.name)
        result = transfer(self) if transfer else None
        return result or [e.everything(shape, self.active) for shape in self.shapes]


# --- transfer functions of the operations


def _moved(of: _EntryOperation) -> list[Entries] | None:
    """The operation itself, applied to the indices of its operands' entries."""
    name, args, kwargs = of.name, of.args, of.kwargs
    if name == "index_put" and ((len(args) > 3 and args[3]) or kwargs.get("accumulate")):
        return None
    if name == "scatter" and (len(args) > 4 or "reduce" in kwargs):
        return None
    start, order = 0, list[Entries]()
    numbers: dict[int, Tensor | None] = {}
    for v in _operands(args, kwargs):
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
    fills = name in ("tril", "triu", "select_backward", "slice_backward", "diag_embed", "im2col")
    if fills:  # with 0, which must be no index
        args = (args[0] + 1, *args[1:])
    if name == "im2col":
        args = (args[0].to(torch.float64), *args[1:])
    outs = of.target(*args, **kwargs)
    outs = outs if isinstance(outs, list | tuple) else [outs]
    return [e.moved(order, y.long().numpy() - (1 if fills else 0)) for y in outs]


def _reduced(of: _EntryOperation) -> list[Entries] | None:
    x, args, kwargs = of.active[0], of.args, of.kwargs
    overload = str(of.target).rpartition(".")[2]
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if type(axis) is int and overload != "default":
        axes = [axis]
    else:
        axes = [*range(len(x.shape))]
        whole = of.name.startswith(("max", "min", "prod", "median"))
        if not (whole and overload in ("", "default")):
            for axis in (*args[1:], kwargs.get("dim")):
                if isinstance(axis, list | tuple) and axis and all(type(d) is int for d in axis):
                    axes = [*axis]
                    break
    result = e.over_axes(x, axes)
    if math.prod(result.shape) != math.prod(of.shapes[0]):
        return None
    return [Entries(shape, result.matrix) for shape in of.shapes]


def _lines(of: _EntryOperation) -> list[Entries] | None:
    place = _ALONG_OPERANDS.get(of.name, 1)
    axis = of.args[place] if len(of.args) > place else of.kwargs.get("dim")
    if type(axis) is not int or not of.shapes[0]:
        return None
    return [e.along(e.entrywise(of.shapes[0], of.active), [axis]) for _ in of.shapes]


def _product(of: _EntryOperation) -> list[Entries] | None:
    added = [of.args[0]] if of.name in ("addmm", "baddbmm", "addmv") else []
    a, b = of.args[len(added) : len(added) + 2]
    batch, width = (a.shape[0] if len(a.shape) == 3 else 1), a.shape[-1]
    rows = a.shape[-2] if len(a.shape) > 1 else 1
    cols = b.shape[-1] if len(b.shape) > 1 else 1
    left, right = e.index_array((batch, rows, width)), e.index_array((batch, width, cols))
    matrix = e.product((a, b), (left, right.swapaxes(1, 2)), _nonzero)
    terms = [v.entries for v in added if v.entries is not None]
    if matrix is not None:
        terms.append(Entries(of.shapes[0], matrix))
    return [e.entrywise(of.shapes[0], terms)]


def _nonzero(x: Tensor) -> np.ndarray:
    """Where a constant, dense or sparse, is not zero."""
    there: np.ndarray = (x.detach().to_dense() != 0).cpu().numpy()
    return there


def _convolved(of: _EntryOperation) -> list[Entries] | None:
    image, kernel, bias, strides, pads, steps, transposed, _, groups = of.args
    constants = kernel.entries is None and (bias is None or bias.entries is None)
    if not constants or transposed or len(kernel.shape) > 4 or image.entries is None:
        return None
    index = torch.from_numpy(e.index_array(image.shape)).to(torch.float64) + 1
    size = kernel.shape[2:]
    if len(size) == 1:
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
    return [Entries(of.shapes[0], made.matrix)]


_TRANSFERS: dict[str, Any] = {
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
