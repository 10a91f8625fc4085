"""Writes gradients to the `.grad` of parameters in PyTorch.

Like the autograd engine, `write_gradients` adds to `.grad` in place where possible, and creates
`.grad` if it is None. A process-wide lock serializes writes, since `p.grad = p.grad + g` would
overwrite an addition by another thread between the read and the write. All checks and allocations
precede the first write. `gradtools.accumulate` documents the public names.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import Any

import torch

from gradtools.accumulate import State
from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.gradient_targets import TargetLeaf, paired, refuse
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.functorch_wrappers import PLAIN, has_overlaps
from gradtools.torch.module_arguments import with_parts
from gradtools.torch.modules import ModuleTree

_LOCK = threading.RLock()
_is_traced = upstream.is_wrapped
_layout, _dtype = attrgetter("layout"), attrgetter("dtype")
Write = tuple[Callable[[Any, Any], Any], torch.Tensor, torch.Tensor]


def write_gradients(target: Any, grads: Any, *, add: bool) -> Any:
    """Adds each gradient to the parameter's `.grad`, or assigns it to `.grad` if not `add`.

    Returns `target`. If an error is raised, no `.grad` is changed.
    """
    caller = "accumulate_gradients" if add else "assign_gradients"
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        merged = _pairs_of_dicts(target, grads)
        if merged is None:
            merged = _pairs(caller, target, grads, add)
        if add:  # the writes do not change the tensors in grads and store no references to them
            buffers = {upstream.storage_key(p.grad) for p, _ in merged if p.grad is not None}
            writes = [_addition(p, g.detach(), buffers) for p, g in merged]
        else:
            writes = [(_set, p, g) for (p, _), g in zip(merged, _taken(merged), strict=True)]
        for write, of, grad in writes:
            write(of, grad)
    return target


def _pairs_of_dicts(target: Any, grads: Any) -> list[tuple[Any, Any]] | None:
    """Pairs parameters and gradients by name. Returns None if `_pairs` must check the pairs."""
    named = ModuleTree.of(target).parameters if isinstance(target, torch.nn.Module) else target
    if not (type(named) is dict and type(grads) is dict and grads.keys() <= named.keys()):
        return None
    merged = [(named[k], g) for k, g in grads.items() if g is not None]
    once = len({id(p) for p, _ in merged}) == len(merged)
    return merged if once and _all_fit(merged) else None


def _pairs(caller: str, target: Any, grads: Any, add: bool) -> list[tuple[Any, Any]]:
    """Pairs each parameter with its gradient.

    Raises an error if an entry is invalid. If a parameter is repeated, its gradients are added if
    `add`; otherwise an error is raised.
    """
    if target is None:
        raise GradtoolsError(
            f"{caller}: target is None; expected the parameters whose .grad is to be written. Pass "
            "the parameters as a pytree of leaf tensors or as a torch.nn.Module."
        )
    named = with_parts(target, lambda m: dict(m.named_parameters(remove_duplicate=False)))
    by_id: dict[int, tuple[str, Any, Any]] = {}
    for entry in paired("torch", trees, caller, named, grads):
        path, p, grad = entry
        if grad is None:
            continue
        _check(caller, entry)
        if id(p) in by_id:
            first, _, other = by_id[id(p)]
            if not add:
                raise GradtoolsError(
                    f"{caller}: target{first} and target{path} are one parameter, and both "
                    "have a gradient. Pass one gradient and None for the other, or add both with "
                    "accumulate_gradients."
                )
            path, grad = first, other.detach() + grad.detach()
        by_id[id(p)] = (path, p, grad)
    return [(p, grad) for _, p, grad in by_id.values()]


# --- functions of the accumulator -------------------------------------------------------


def detached(x: Any) -> torch.Tensor | None:
    """Returns x without its graph, or None if x is not a tensor or is a parameter."""
    is_gradient = isinstance(x, torch.Tensor) and type(x) is not torch.nn.Parameter
    return x.detach() if is_gradient else None


def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def current_trace() -> Any:
    """Returns the level of the innermost active transform of `torch.func`, or None."""
    level = upstream.peek_interpreter_stack()
    return None if level is None else level.level()


spec: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter("layout", "dtype", "shape", "device")
"""Returns the properties that must be equal for all gradients of a parameter."""


def varies(x: torch.Tensor) -> frozenset[Any]:
    """Returns an empty set: only JAX tracks the mesh axes along which an array varies."""
    return frozenset()


def spec_in_words(spec: tuple[Any, ...]) -> str:
    """Describes a tensor's dtype, shape and device, and its layout if the tensor is not strided."""
    layout, dtype, shape, device = spec
    words = "" if layout == torch.strided else f"{_short(layout)} "
    return f"{words}{_short(dtype)} of shape {tuple(shape)} on {device}"


def times(xs: Sequence[torch.Tensor], number: float) -> list[torch.Tensor]:
    return [*upstream.multiply_each([*xs], number)] if _are_plain(xs) else [x * number for x in xs]


def over(xs: Sequence[torch.Tensor], number: float) -> list[torch.Tensor]:
    return [*upstream.divide_each([*xs], number)] if _are_plain(xs) else [x / number for x in xs]


def _are_plain(xs: Sequence[torch.Tensor]) -> bool:
    """Returns whether all xs are plain tensors, which one fused operation can process."""
    if not xs or upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0:
        return False
    return {*map(type, xs)} == {torch.Tensor} and {*map(_layout, xs)} == {torch.strided}


def added(totals: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], weight: Any) -> bool:
    """Adds weight times xs to `totals` in place.

    Returns False if `totals` cannot be changed in place.
    """
    if type(weight) not in (int, float) or not (_are_plain(totals) and _are_plain(xs)):
        return False
    if any(map(torch.Tensor.is_inference, totals)):
        return False
    pairs = zip(map(_dtype, totals), map(_dtype, xs), strict=True)
    if any(torch.promote_types(*pair) is not pair[0] for pair in {*pairs}):
        return False
    with torch.no_grad():
        upstream.add_each_([*totals], [*xs], alpha=float(weight))
    return True


def sums_over_ranks(own: State | None, group: Any, axis_name: Any) -> Any:
    """Returns `(treedef, sums, weight, dtypes)`; the sums and the weight are over all ranks."""
    # Imported here, since importing torch.distributed is slow and few programs use it.
    from gradtools.torch.gathering import add_over_ranks_, check_group, values_of_ranks

    check_group(_MEAN, axis_name, group)
    if upstream.peek_interpreter_stack() is not None:
        raise GradtoolsError(
            f"{_MEAN}: a torch.func transform cannot contain a sum over processes. Use "
            "mean() inside, and add its result to an accumulator outside."
        )
    layout = [] if own is None else [*zip(own.paths, map(_described, own.totals), strict=True)]
    weight = 0 if own is None else own.weight
    sent = values_of_ranks((layout, float(weight) if isinstance(weight, float) else weight), group)
    weights = _checked_weights(sent)
    assert own is not None
    for x in own.totals:  # a DTensor is equal on all ranks: sum = number of ranks * DTensor
        if is_distributed(x):
            x *= len(weights)
    add_over_ranks_([x for x in own.totals if not is_distributed(x)], group)
    return own.treedef, own.totals, sum(weights), own.dtypes


_MEAN = "GradientAccumulator.mean"


def _described(x: torch.Tensor) -> str:
    kind = "DTensor" if is_distributed(x) else _short(x.layout)
    return f"{kind} {_short(x.dtype)} of shape {tuple(x.shape)}"


def _checked_weights(sent: Sequence[Any]) -> list[Any]:
    """Returns the weights of all processes.

    Raises an error on every rank if the sums cannot be added.
    """
    layouts, weights = [layout for layout, _ in sent], [weight for _, weight in sent]
    for rank, layout in enumerate(layouts):
        if not layout:
            raise GradtoolsError(
                f"{_MEAN}: nothing has been added on rank {rank}. Call add(grads) on all ranks, "
                "with zeros and weight 0 where there is no example."
            )
        for first, leaf in zip_longest(layouts[0], layout):
            if first != leaf:
                words = ["nothing" if x is None else f"grads{x[0]}, {x[1]}" for x in (leaf, first)]
                raise GradtoolsError(
                    f"{_MEAN}: rank {rank} has {words[0]} where rank 0 has {words[1]}. Add "
                    "gradients with the same structure on all ranks; add zeros for parameters "
                    "without a gradient."
                )
    kinds = {described.partition(" ")[0] for _, described in layouts[0]}
    if kinds - {"strided", "DTensor"}:
        raise GradtoolsError(
            f"{_MEAN}: sums of kind {', '.join(sorted(kinds))} cannot be added over ranks. Give "
            "dense gradients."
        )
    if "DTensor" in kinds and len({*weights}) > 1:
        raise GradtoolsError(
            f"{_MEAN}: the ranks added a DTensor with the weights {weights}, but a DTensor is "
            "one gradient for all ranks. Pass the total weight of all ranks to add() on each rank, "
            "and scale each rank's loss by its share of that weight before backward()."
        )
    return weights


def is_distributed(x: Any) -> bool:
    """Returns whether x is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


# --- the writes --------------------------------------------------------------------------


def _addition(p: torch.Tensor, g: torch.Tensor, buffers: set[Any]) -> Write:
    """Returns a function and its two arguments. Calling the function adds g to `p.grad`.

    buffers: The storage keys of the `.grad` tensors of all parameters (see `storage_key`).
    """
    old = p.grad
    if upstream.storage_key(g) in buffers:
        g = g.clone()
    if old is None:
        return _set, p, g.clone()
    # The sum is written in place if the old gradient has no graph and no overlapping entries.
    writable = not (old.requires_grad or old.is_inference())
    if writable and old.layout == torch.strided:
        writable = not has_overlaps(old)
    if writable and old.layout in (torch.strided, g.layout):
        return torch.Tensor.add_, old, g
    return _set, p, g + old.detach() if old.layout != torch.strided else old.detach() + g


def _taken(merged: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the detached gradients.

    Copies all gradients if one of them is not contiguous or if two of them may share memory.
    """
    grads = [g.detach() for _, g in merged]
    dense = all(g.layout is torch.strided and g.is_contiguous() for g in grads)
    return grads if dense and _are_apart(grads) else [g.clone() for g in grads]


def _are_apart(xs: Sequence[torch.Tensor]) -> bool:
    """Returns whether no two of these contiguous tensors overlap in memory."""
    try:
        spans = sorted([(x.data_ptr(), x.nbytes) for x in xs])
    except (NotImplementedError, RuntimeError):  # raised for wrapped or fake tensors
        return False
    return all(start + size <= after for (start, size), (after, _) in pairwise(spans))


def _set(p: torch.Tensor, new: torch.Tensor) -> None:
    p.grad = new


# --- checks ------------------------------------------------------------------------------


def _check(caller: str, entry: TargetLeaf) -> None:
    p, g, path = entry.target, entry.grad, entry.path
    for side, x in (("target", p), ("grads", g)):
        if not isinstance(x, torch.Tensor):
            came = f"{side}{path} is {with_article(type(x).__name__)}"
            refuse(caller, came, "a tensor", "Give parameters and their gradients.")
    if _is_traced(p) or _is_traced(g):
        raise GradtoolsError(
            f"{caller}: grads{path} belongs to a torch.func transform that is still running; .grad "
            "would outlive it. Return the gradients from the transformed function and write them "
            "outside."
        )
    if _is_same(p, g):
        fix = "Pass the gradients, for example p.grad or the result of grad."
        refuse(caller, f"grads{path} is the parameter itself", "its gradient", fix)
    if not p.is_leaf:
        came, fix = f"target{path} is the result of {type(p.grad_fn).__name__}", "Give parameters."
        refuse(caller, came, "a leaf tensor", f"{fix} Intermediate results have no .grad.")
    if not (p.is_floating_point() or p.is_complex()):
        came = f"target{path} is {_short(p.dtype)} of shape {tuple(p.shape)}"
        fix = "Leave the entry out of grads, or set it to None."
        refuse(caller, came, "a floating or complex tensor", fix)
    if not p.requires_grad:
        fix = "If it is a detached copy, as from make_functional or torch.func, pass the module or "
        fix += "its parameters, and build the optimizer from module.parameters(); if it is a "
        fix += "frozen parameter, call requires_grad_() on it or leave its name out of grads."
        came = f"target{path} has requires_grad=False"
        refuse(caller, came, "a tensor that requires grad", fix)
    dtype = _expected_dtype(p, g)
    if g.shape == p.shape and g.dtype == dtype and g.device == p.device:
        return
    fix = f"Convert the gradient with .to({dtype}), or set the parameter's grad_dtype."
    if g.device != p.device:
        fix = f"Move the gradient with .to({str(p.device)!r})."
    if g.shape != p.shape:
        fix = "Reduce the gradient over the batch first, or check which parameter it belongs to."
    expected = f"{_short(dtype)} of shape {tuple(p.shape)} on {p.device}, like the parameter"
    refuse(caller, f"grads{path} is {spec_in_words(spec(g))}", expected, fix)


def _all_fit(merged: Sequence[tuple[Any, Any]]) -> bool:
    """Returns whether all targets are plain leaf tensors with matching gradients."""
    ps, gs = [p for p, _ in merged], [g for _, g in merged]
    if not ({*map(type, gs)} <= {torch.Tensor} and {*map(type, ps)} <= PLAIN):
        return False
    if any(map(_is_traced, ps)) or any(map(_is_traced, gs)) or any(map(_is_same, ps, gs)):
        return False
    if not all(p.requires_grad and p.is_leaf for p in ps):
        return False
    properties = attrgetter("shape"), attrgetter("device")
    alike = all([*map(of, ps)] == [*map(of, gs)] for of in properties)
    return alike and [*map(_expected_dtype, ps, gs)] == [*map(_dtype, gs)]


def _is_same(p: torch.Tensor, g: torch.Tensor) -> bool:
    """Returns whether g is p, or an alias of p such as the params of `make_functional`."""
    if g is p or not upstream.is_alias_of(p, g):
        return g is p
    return p.layout is torch.strided and g.storage_offset() == p.storage_offset()


def _expected_dtype(p: torch.Tensor, g: torch.Tensor) -> torch.dtype:
    """Returns the dtype that a gradient of p must have.

    The result is `p.grad_dtype`, or p's dtype before PyTorch 2.10. If `p.grad_dtype` is None, the
    result is the dtype of `p.grad`, or of g if `p.grad` is None.
    """
    return getattr(p, "grad_dtype", p.dtype) or (g.dtype if p.grad is None else p.grad.dtype)


def _short(name: Any) -> str:
    return str(name).removeprefix("torch.")
