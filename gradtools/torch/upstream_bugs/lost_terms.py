"""Derivative formulas of PyTorch that lose a term when differentiated again: refused there.

Some of its rules may not be differentiated again: a term is left out, in silence. What they give
is right and may be read; here it is made to refuse the derivative that would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.backend import Fun
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import surveyed
from gradtools.torch.compiling import nodes_of
from gradtools.torch.functorch_wrappers import is_mapped
from gradtools.torch.nondifferentiable import gated

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped

# Operations whose tangent may not be differentiated again: PyTorch's rules leave a term out, in
# silence. The umbrella is torch#198017; tests/torch/test_engine.py tells when one is mended.
_TANGENT_IS_A_CONSTANT = {
    "NativeLayerNormBackward0": "layer_norm (torch#196700)",
    "NativeBatchNormBackward0": "batch_norm in training mode (torch#196699)",
    "NativeBatchNormLegitBackward0": "batch_norm in training mode (torch#196699)",
    "NativeBatchNormLegitBackward1": "batch_norm in training mode (torch#196699)",
    "BatchNormWithUpdateBackward0": "batch_norm in training mode (torch#196699)",
    "CudnnBatchNormBackward0": "batch_norm in training mode (torch#196699)",
    "LinalgDetBackward0": "linalg.det (torch#192540)",
    "LinalgSlogdetBackward0": "linalg.slogdet (torch#192540)",
    "LinalgSolveExBackward0": "linalg.solve (torch#192540)",
    "LinalgHouseholderProductBackward0": "linalg.householder_product (torch#198017)",
}
# The same in reverse mode: second derivatives are right, third ones are not.
_TWICE_AT_MOST = {
    "NativeLayerNormBackwardBackward0": "layer_norm (torch#175754)",
    "NativeBatchNormBackwardBackward0": "batch_norm in training mode (torch#186256)",
    "CudnnBatchNormBackwardBackward0": "batch_norm in training mode (torch#186256)",
}
WRONG_IN_BATCHES = {"CdistBackward0": "cdist"}
NORMALISATIONS = {k: v for k, v in _TANGENT_IS_A_CONSTANT.items() if "norm (" in v or "mode" in v}


def guarded_tangents(
    caller: str,
    fun: Fun,
    xs: Sequence[Tensor],
    ts: Sequence[Tensor],
    primals: list[Tensor],
    pushed: list[Tensor],
) -> list[Tensor]:
    """The tangents of f at xs along ts; those that would be differentiated wrongly refuse it.

    While a function is pushed along, what is called from Python goes another way
    (`derivatives.py`); this is for what no mode sees, such as TorchScript. It is asked within
    the level of forward mode, where what was saved shows its tangent.
    """
    if not _tracked(primals):
        return pushed
    custom = surveyed(primals).custom
    if custom:
        from gradtools.torch.double_backward import gated_tangents

        pushed = gated_tangents(caller, fun, xs, ts, primals, custom, pushed)
    for node, wrong in _held(_TANGENT_IS_A_CONSTANT, primals):
        x = _input_of(node)
        if x is not None and x.requires_grad and _has_tangent(x):
            message = (
                f"{caller}: the tangent is differentiated once more, but f holds {wrong}, of whose "
                "forward-mode rule PyTorch then leaves a term out. Use linearize(f, *primals)[1], "
                "which pushes by transposing the pullback, or plain operations."
            )
            return list(gated(pushed, [forward_ad.unpack_dual(x).primal], message))
    return pushed


def refuse_in_batches(
    caller: str, ys: Sequence[Tensor], cts: Sequence[Tensor], wrong: str | None
) -> None:
    """Raises if vmap maps cotangents, but not their outputs, which hold one of these operations."""
    if wrong and any(is_mapped(ct) and not is_mapped(y) for y, ct in zip(ys, cts, strict=True)):
        raise GradtoolsError(
            f"{caller}: f holds {wrong}, whose backward pass PyTorch computes wrongly where vmap "
            "maps the cotangent alone (no upstream report was found). Pass chunk_size=1, which is "
            "a plain loop, or write it by plain operations."
        )


def guarded_gradients(
    caller: str, outs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The cotangents; those of second order that PyTorch would differentiate wrongly refuse it."""
    pushed = [g for g in grads if g is not None and _has_tangent(g)]
    if not pushed and not _tracked(grads):
        return grads
    result = [(_input_of(node), name) for node, name in _held(_TWICE_AT_MOST, outs)]
    for x, name in result if pushed else ():
        if x is None or _has_tangent(x):
            raise GradtoolsError(third(caller, name))
    sources = [x for x, _ in result if x is not None and x.requires_grad]
    tracked = _tracked(grads)
    if not sources or not tracked:
        return grads
    left = iter(gated(tracked, sources, third(caller, result[0][1])))
    return [next(left) if g is not None and g.requires_grad else g for g in grads]


def _input_of(node: Any) -> Tensor | None:
    """What a normalisation normalises, or linear algebra takes, whose derivative lacks the term.

    Along its other inputs, cotangent and weight, it is right. None if the graph was freed.
    """
    try:
        return upstream.saved(node, "input" if upstream.saves(node, "input") else "A")
    except RuntimeError:
        return None


def _has_tangent(x: Tensor) -> bool:
    beneath = upstream.peek_interpreter_stack() is not None  # its levels are hidden
    if beneath or upstream.forward_level() < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def third(caller: str, wrong: str) -> str:
    """What is said of a third derivative that would be wrong."""
    return (
        f"{caller}: a third derivative is taken of {wrong}, which PyTorch computes without one of "
        "its terms (a tangent that linearize pushes is a second one: it transposes twice). Write "
        "it by plain operations (mean, var, sqrt)."
    )


def _tracked(xs: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in xs if x is not None and x.requires_grad]


def first_of(names: dict[str, str], outs: Sequence[Tensor]) -> str | None:
    """The first of these operations that the graph of outs holds."""
    return next((name for _, name in _held(names, outs)), None)


def _held(names: dict[str, str], outs: Sequence[Tensor]) -> Iterator[tuple[Any, str]]:
    """The nodes of these operations in the graph of outs, with their names."""
    for node in nodes_of(_tracked(outs)):
        name = names.get(type(node).__name__)
        if name is not None and _trains(node):
            yield node, name


def _trains(node: Any) -> bool:
    """Whether a normalisation takes its statistics from its input; all others do."""
    return bool(upstream.saved(node, "training", upstream.saved(node, "train", True)))
