"""Plain programs in reverse mode: corrected gradients at the nodes of autograd's graph.

Eager reverse mode needs no function mode, for the graph shows which operations ran. Before a
pullback the nodes of the table's operations are collected from the graph, and during it a hook at
each of them returns the corrected gradient:

- if the gradient itself is wrong: the vjp of the plain program;
- if its derivative is wrong or missing, and the pullback creates a graph: the kernel's own values
  with the derivative of the plain program's vjp (`with_derivative`). A pullback without a graph
  runs the kernel only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradtools.rules import replaced_at, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling, nodes_of
from gradtools.torch.functorch_wrappers import is_inexact, is_mapped
from gradtools.torch.modes import unpacked
from gradtools.torch.operation_marks import OWN_HOOKS
from gradtools.torch.plain_programs import programs

Tensor = torch.Tensor
Values = Sequence[Any]
Call = tuple[Callable[..., Any], list[Any]]


@dataclass(frozen=True, eq=False, repr=False)
class BackwardNode:
    """The correction of the nodes of one operation.

    Attributes:
        call: From a node to the plain program and its arguments, one for each edge of the node.
        wrong: Whether the gradient itself is wrong at a node; otherwise only its derivatives are.
        when: Whether a node is wrong at all.
        mapped: Whether the gradient, or its derivative, is wrong if vmap maps the cotangent:
            batching rules treat means and deviations as constants.
        result: `result(node, gradients, cotangents)`: the corrected gradients, if they are simpler
            than a program.
    """

    call: Callable[[Any], Call] | None = None
    wrong: Callable[[Any], bool] = lambda node: False
    when: Callable[[Any], bool] = lambda node: True
    mapped: bool = False
    result: Callable[[Any, Values, Values], Any] | None = None

    def hook(self, node: Any, again: bool) -> Callable[[Values, Values], Any] | None:
        """The hook for a node; None if its values are right and not differentiated.

        Reads the node's saved tensors now: `torch.utils.checkpoint` unpacks them once only.
        """
        wrong = self.wrong(node)
        if not (wrong or again or self.mapped):
            return None
        call = None if self.call is None else self.call(node)
        return partial(self._corrected, node, wrong, call)

    def _corrected(
        self, node: Any, wrong: bool, call: Call | None, given: Values, cts: Values
    ) -> Any:
        cts = [cts] if isinstance(cts, Tensor) else cts
        if all(ct is None for ct in cts):
            return None
        wrong = wrong or (self.mapped and any(ct is not None and is_mapped(ct) for ct in cts))
        if not (wrong or torch.is_grad_enabled()):
            return None
        if self.result is not None:
            return self.result(node, given, cts)
        assert call is not None
        program, xs = call
        places = [i for i, g in enumerate(given) if g is not None and i < len(xs)]
        operands = [*cts, *xs]
        there = [x is not None for x in operands]
        tensors = [x for x in operands if x is not None]
        pulled = partial(_pulled, program, places, there, len(cts))
        if wrong:
            result = pulled(*tensors)
        else:
            # Rules import this module.
            from gradtools.torch.forward_mode.by_transposing import with_derivative

            name = type(node).__name__.removesuffix("Backward0")
            result = with_derivative(name, pulled, tensors, [given[i] for i in places])
        left = iter(result)
        return tuple([next(left) if i in places else g for i, g in enumerate(given)])


def _pulled(
    program: Callable[..., Any], places: list[int], there: list[bool], count: int, *tensors: Any
) -> list[Any]:
    """The program's vjp with respect to the arguments at these positions.

    Args:
        program: The plain program.
        places: The positions.
        there: Which of the cotangents and arguments are not None.
        count: The number of cotangents, one for each output.
        tensors: The cotangents and then the arguments, without None.
    """
    operands = spread(tensors, there)
    cts, xs = operands[:count], operands[count:]

    def run(*moving: Tensor) -> Any:
        outs = program(*replaced_at(xs, places, moving))
        outs = [outs] if isinstance(outs, Tensor) else outs
        pairs = zip(outs, cts, strict=False)
        return tuple([y for y, ct in pairs if ct is not None and y is not None])

    outs, pull = vjp(run, *[xs[i] for i in places])
    seeds = zip([ct for ct in cts if ct is not None], outs, strict=True)
    return [g.view_as(g) for g in pull(tuple([ct.to(y.dtype) for ct, y in seeds]))]


# --- the programs at nodes -----------------------------------------------------------------------


def _saved(node: Any, *names: str) -> list[Any]:
    return [upstream.saved(node, name) for name in names]


def _by(
    program: Callable[..., Any], *tensors: str, others: tuple[str, ...] = ()
) -> Callable[[Any], Call]:
    """A program at saved tensors of a node, followed by other arguments that it saved.

    Like all of these it reads each of them once (see `BackwardNode.hook`).
    """

    def call(node: Any) -> Call:
        saved = _saved(node, *others)
        # The node exposes a signed integer as an unsigned one.
        more = [x - (x >= 2**63) * 2**64 if type(x) is int else x for x in saved]
        return lambda *xs: program(*xs, *more), _saved(node, *tensors)

    return call


def _layer_norm(node: Any) -> Call:
    x, shape, weight, bias = _saved(node, "input", "normalized_shape", "weight", "bias")
    return _over_last_axes(x, shape, upstream.saved(node, "result2")), [x, weight, bias]


def _over_last_axes(x: Tensor, shape: Any, rstd: Tensor) -> Callable[..., Tensor]:
    """Layer norm, as a function of input, weight and bias.

    Its eps is recovered from the reciprocal deviation at the input x.
    """
    dims = tuple(range(-len(shape), 0))
    variance = programs.value_of(x).var(dims, unbiased=False, keepdim=True)
    eps = rstd.detach().reshape(variance.shape) ** -2 - variance
    return lambda x, w=None, b=None: programs.layer_norm(x, shape, w, b, eps)


def _batch_norm(node: Any) -> Call:
    x, weight = _saved(node, "input", "weight")
    xs = [x, weight, None if weight is None else torch.zeros_like(weight)]
    if upstream.saved(node, "training", True):
        return _over_batch(node), xs
    statistics = _saved(node, "running_mean", "running_var", "eps")
    return lambda x, w, b: programs.batch_norm_by_statistics(x, w, b, *statistics), xs


def _over_batch(node: Any) -> Callable[..., Tensor]:
    """Batch norm in training mode, as a function of input, weight and bias."""
    eps = upstream.saved(node, "eps", None)
    eps = upstream.saved(node, "epsilon") if eps is None else eps  # cuDNN's
    return lambda x, w=None, b=None: programs.batch_norm(x, w, b, None, None, True, 0.0, eps, True)


def _norm_pullback(program: Callable[..., Any]) -> Callable[..., Any]:
    """The pullback of a normalisation, as a function of cotangent, input and weight."""

    def run(ct: Tensor, x: Tensor, weight: Any = None) -> tuple[Tensor, ...]:
        affine = [] if weight is None else [weight, torch.zeros_like(weight)]
        return tuple(vjp(program, x, *affine)[1](ct))

    return run


def _layer_norm_pullback(node: Any) -> Call:
    ct, x, shape, rstd, weight = _saved(
        node, "grad_out", "input", "normalized_shape", "rstd", "weight"
    )
    run = _norm_pullback(_over_last_axes(x, shape, rstd))
    xs = [ct, x, None, None, weight, None]
    return lambda ct, x, mean, rstd, weight, bias=None: run(ct, x, weight), xs


def _batch_norm_pullback(node: Any) -> Call:
    run = _norm_pullback(_over_batch(node))
    ct = upstream.saved(node, "grad_out", None)
    if ct is not None:
        return run, [ct, *_saved(node, "input", "weight")]
    return lambda x, ct, weight: run(ct, x, weight), _saved(node, "input", "grad_output", "weight")


def _attention(node: Any) -> Call:
    mask = upstream.saved(node, "attn_mask", upstream.saved(node, "attn_bias", None))
    causal, scale = _saved(node, "is_causal", "scale")

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = mask) -> Tensor:
        grouped = q.shape[-3] != k.shape[-3]
        kind = q.dtype
        if kind in (torch.bfloat16, torch.float16):  # in float32, rounded at the end, as kernels do
            q, k, v = (x.float() for x in (q, k, v))
        return programs.attention(q, k, v, mask, 0.0, causal, scale, grouped).to(kind)

    return run, [*_saved(node, "query", "key", "value"), mask]


def _ldexp(node: Any, given: Values, cts: Values) -> Any:
    x, *others = given
    if x is None:
        return None
    scale = torch.ldexp(torch.ones_like(cts[0]), upstream.saved(node, "other"))
    return ((cts[0] * scale).sum_to_size(x.shape).to(x.dtype), *others)


def _as_strided_scatter(node: Any, given: Values, cts: Values) -> Any:
    size, stride, offset = _saved(node, "size", "stride", "storage_offset")
    flat, kept = cts[0].flatten(), torch.arange(cts[0].numel(), device=cts[0].device)
    places = kept.as_strided(size, stride, offset or 0)
    result = flat.index_fill(0, places.flatten(), 0).reshape(cts[0].shape), flat[places]
    return tuple([None if g is None else r for g, r in zip(given, result, strict=True)])


def _sparse(node: Any, given: Values, cts: Values) -> Any:
    """The cotangent's entries at the indices; PyTorch gathers them without a graph."""
    at, ct = upstream.indices_of(upstream.saved(node, "result").detach()), cts[0]
    places = [k for k, g in enumerate(given) if g is not None]
    result = ct[tuple(at)] if ct.layout is torch.strided else _looked_up(ct, at)
    return tuple([result if k in places else g for k, g in enumerate(given)])


def _looked_up(x: Tensor, at: Tensor) -> Tensor:
    """The entries of a sparse tensor at these indices, by binary search."""
    x = x.coalesce()
    sizes = torch.tensor(x.shape[: at.shape[0]], device=at.device)
    steps = torch.cat((sizes.flip(0).cumprod(0).flip(0)[1:], sizes.new_ones(1)))[:, None]
    own, wanted = ((indices * steps).sum(0) for indices in (x.indices(), at))
    entries = x.values()
    if not len(own):
        return entries.new_zeros((len(wanted), *entries.shape[1:]))
    k = torch.searchsorted(own, wanted).clamp(max=len(own) - 1)
    there = (own[k] == wanted).reshape(-1, *[1] * (entries.dim() - 1))
    return entries[k].masked_fill(~there, 0.0)


# --- the table by nodes --------------------------------------------------------------------------


def _has_strided_statistics(node: Any) -> bool:
    statistics = _saved(node, "weight", "running_mean", "running_var")
    return not all(x is None or x.is_contiguous() for x in statistics)


def _has_bias_alone(node: Any) -> bool:
    if node.next_functions[1][0] is not None:  # reading saved tensors would rerun a checkpoint
        return False
    return upstream.saved(node, "weight") is None and upstream.saved(node, "bias") is not None


def _is_singular(node: Any) -> bool:
    """Whether a pivot is nearly zero; PyTorch's gradient without a graph is zero then."""
    pivots = upstream.saved(node, "LU").diagonal(dim1=-2, dim2=-1).abs()
    if not pivots.numel():
        return False
    eps = torch.finfo(pivots.dtype).eps
    return bool((pivots.amin(-1) <= 100 * eps * pivots.amax(-1)).any())


def _trains(node: Any) -> bool:
    return bool(upstream.saved(node, "train", upstream.saved(node, "training", True)))


_ALWAYS = lambda node: True
_KERNELS = ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
NODES = {
    "LdexpBackward0": BackwardNode(
        result=_ldexp,
        wrong=_ALWAYS,
        when=lambda node: (n := upstream.saved(node, "other")) is not None and not is_inexact(n),
    ),
    "AsStridedScatterBackward0": BackwardNode(result=_as_strided_scatter, wrong=_ALWAYS),
    "SiluBackward0": BackwardNode(
        _by(programs.silu, "self"),
        wrong=_ALWAYS,
        when=lambda node: upstream.described(node)[0].dtype.is_complex,
    ),
    "LogcumsumexpBackward0": BackwardNode(_by(programs.logcumsumexp, "self", others=("dim",))),
    "SparseCooTensorWithDimsAndTensorsBackward0": BackwardNode(result=_sparse),
    "NativeLayerNormBackward0": BackwardNode(_layer_norm, when=_has_bias_alone, mapped=True),
    "NativeLayerNormBackwardBackward0": BackwardNode(_layer_norm_pullback),
    "NativeBatchNormBackward0": BackwardNode(
        _batch_norm, wrong=_has_strided_statistics, when=_has_strided_statistics, mapped=True
    ),
    "NativeBatchNormBackwardBackward0": BackwardNode(_batch_norm_pullback, when=_trains),
    "CudnnBatchNormBackward0": BackwardNode(_batch_norm, when=lambda node: False, mapped=True),
    "CudnnBatchNormBackwardBackward0": BackwardNode(_batch_norm_pullback, when=_trains),
    "WeightNormInterfaceBackward0": BackwardNode(
        _by(programs.weight_norm, "v", "g", others=("dim",))
    ),
    "CdistBackward0": BackwardNode(_by(programs.cdist, "x1", "x2", others=("p",)), mapped=True),
    "PdistBackward0": BackwardNode(_by(programs.pdist, "self", others=("p",))),
    "HardsigmoidBackward0": BackwardNode(_by(programs.hardsigmoid, "self")),
    "SincBackward0": BackwardNode(_by(programs.sinc, "self")),
    "LinalgDetBackward0": BackwardNode(_by(programs.det, "A"), wrong=_is_singular),
    **{
        f"ScaledDotProduct{kernel}Backward0": BackwardNode(
            _attention,
            when=lambda node: not upstream.saved(node, "dropout_p"),  # not reproducible otherwise
        )
        for kernel in _KERNELS
    },
}
WRONG = frozenset(NODES)
"""The types of the nodes."""


def multiplies_by_deviation(node: Any) -> bool:
    """Whether a node may be the product of `(x - mean) * rstd` with constant statistics.

    PyTorch's batching rules for the gradient of a normalisation do so (functorch#534).
    """
    if type(node).__name__ != "MulBackward0" or node.next_functions[1][0] is not None:
        return False
    difference = node.next_functions[0][0]
    if type(difference).__name__ != "SubBackward0" or difference.next_functions[1][0] is not None:
        return False
    deviation, shape = upstream.saved(node, "other"), upstream.described(node)[0].shape
    return deviation.dim() == len(shape) > 1 and deviation.shape[-1] == 1 < shape[-1]


def is_wrong(node: Any) -> bool:
    row = NODES.get(type(node).__name__)
    return row is not None and row.when(node)


def wrong_nodes(outs: Sequence[Any]) -> list[Any]:
    """The nodes in the graph of outs at which PyTorch's derivatives are wrong."""
    nodes = nodes_of([y for y in outs if y.requires_grad])
    return [node for node in nodes if is_wrong(node)]


def wrong_in_batches(outs: Sequence[Any]) -> list[Any]:
    """The nodes in the graph of outs at which they are wrong if vmap maps the cotangents."""
    names = {name for name, row in NODES.items() if row.mapped}
    return [node for node in nodes_of(outs) if type(node).__name__ in names]


@contextmanager
def corrected(nodes: Sequence[Any], again: bool = True) -> Iterator[None]:
    """Context for a pullback in which these nodes return corrected gradients.

    Args:
        nodes: The nodes.
        again: Whether the gradients may be differentiated.
    """
    if not nodes:
        yield
        return
    pairs: list[Any] = []
    read = lambda ct: pairs.extend(
        [(node, NODES[type(node).__name__].hook(node, again)) for node in nodes]
    )
    if torch.is_grad_enabled() and upstream.peek_interpreter_stack() is None:
        # Inside of one pullback a checkpoint recomputes once for all of its saved tensors.
        with torch.enable_grad():
            number = torch.zeros((), requires_grad=True)
            number.register_hook(read)
            OWN_HOOKS[0] += 1
            torch.autograd.grad(number * 1, number)
    else:
        read(None)
    handles = [node.register_hook(hook) for node, hook in pairs if hook is not None]
    OWN_HOOKS[0] += len(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def corrected_vjp(fun: Callable[..., Any], *xs: Tensor, has_aux: bool = False) -> Any:
    """`torch.func.vjp` of a function that returns a sequence of tensors, with right gradients."""
    if is_compiling():
        return vjp(fun, *xs, has_aux=has_aux)
    wrong: list[Any] = []

    def noted(*xs: Tensor) -> Any:
        result = fun(*xs)
        wrong[:] = wrong_nodes(result[0] if has_aux else result)
        return result

    outs, pull, *aux = vjp(noted, *xs, has_aux=has_aux)

    def pullback(cts: Any) -> Any:
        with corrected(wrong):
            return pull(cts)

    return outs, pullback, *aux


def vjp(fun: Callable[..., Any], *xs: Any, has_aux: bool = False) -> Any:
    """`torch.func.vjp` inside of hooks on saved tensors, which it refuses and which see nothing."""
    if is_compiling():
        return torch.func.vjp(fun, *xs, has_aux=has_aux)  # type: ignore[misc]
    with unpacked():
        outs, pull, *aux = torch.func.vjp(fun, *xs, has_aux=has_aux)  # type: ignore[misc]

    def pullback(cts: Any) -> Any:
        with unpacked():
            return pull(cts)

    return outs, pullback, *aux
