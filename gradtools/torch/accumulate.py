"""Writing gradients in PyTorch: into `.grad` of the real parameters.

Like the autograd engine, this adds to `.grad` in place where possible and creates it if it is None.
A process-wide lock serializes it, since `p.grad = p.grad + g` would lose what another thread adds
between the read and the write. Everything that can fail (checks, allocation) comes before the first
write. `gradtools.accumulate` documents the public names.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from gradtools.accumulate import State
from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.gradient_targets import TargetLeaf, paired, refuse
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.module_arguments import with_parts

_LOCK = threading.RLock()
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_traced = upstream.is_wrapped
_layout, _dtype = attrgetter("layout"), attrgetter("dtype")
Write = tuple[Callable[[Any, Any], Any], torch.Tensor, torch.Tensor]


def write_gradients(target: Any, grads: Any, *, add: bool) -> Any:
    """Adds to, or sets, `.grad` of every parameter that grads names; atomic if anything fails."""
    from gradtools.torch.modules import ModuleTree

    caller = "accumulate_gradients" if add else "assign_gradients"
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        # The common case: a module or a flat dict, of which each gradient fits and occurs once.
        module, merged = isinstance(target, torch.nn.Module), list[tuple[Any, Any]]()
        named = ModuleTree.of(target).parameters if module else target
        fits = type(named) is dict and type(grads) is dict and grads.keys() <= named.keys()
        if fits:
            merged = [(named[k], g) for k, g in grads.items() if g is not None]
            once = len({id(p) for p, _ in merged}) == len(merged)
            fits = once and _all_fit(merged)
        if not fits:
            if target is None:
                raise GradtoolsError(
                    f"{caller}: target is None; expected the parameters whose .grad is to be "
                    "written. Give them as a pytree of leaf tensors or a torch.nn.Module."
                )
            named = with_parts(target, lambda m: dict(m.named_parameters(remove_duplicate=False)))
            entries = paired(trees, caller, named, grads)
            # One sum for a parameter that occurs several times.
            by_id: dict[int, tuple[str, Any, Any]] = {}
            for path, p, grad in entries:
                if grad is None:
                    continue
                _check(caller, TargetLeaf(path, p, grad))
                if id(p) in by_id:
                    first, _, other = by_id[id(p)]
                    if not add:
                        raise GradtoolsError(
                            f"{caller}: target{first} and target{path} are one parameter, and each "
                            "was given a gradient. Give it one, with None at the other place, or "
                            "add both with accumulate_gradients."
                        )
                    path, grad = first, other.detach() + grad.detach()
                by_id[id(p)] = (path, p, grad)
            merged = [(p, grad) for _, p, grad in by_id.values()]
        if add:  # the writes neither change nor keep the given tensors
            buffers = {_memory(p.grad) for p, _ in merged if p.grad is not None}
            writes = [_addition(p, g.detach(), buffers) for p, g in merged]
        else:
            writes = [(_set, p, g) for (p, _), g in zip(merged, _taken(merged), strict=True)]
        for write, of, grad in writes:
            write(of, grad)
    return target


# --- what the accumulator needs ----------------------------------------------------------


def detached(x: Any) -> torch.Tensor | None:
    """The detached tensor; None if x is no tensor."""
    return x.detach() if isinstance(x, torch.Tensor) else None


def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def current_trace() -> Any:
    """An identifier of the current `torch.func` nesting; None outside of all transforms."""
    level = upstream.peek_interpreter_stack()
    return None if level is None else level.level()


spec: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter("layout", "dtype", "shape", "device")
"""The properties that all gradients of a parameter must share."""


def varies(x: torch.Tensor) -> frozenset[Any]:
    """No mesh axes, which only JAX tracks."""
    return frozenset()


def spec_in_words(spec: tuple[Any, ...]) -> str:
    """Layout (unless dense), dtype, shape and device."""
    layout, dtype, shape, device = spec
    words = "" if layout == torch.strided else f"{_short(layout)} "
    return f"{words}{_short(dtype)} of shape {tuple(shape)} on {device}"


def times(xs: Sequence[torch.Tensor], number: float) -> list[torch.Tensor]:
    return [*upstream.multiply_each(xs, number)] if _are_plain(xs) else [x * number for x in xs]


def over(xs: Sequence[torch.Tensor], number: float) -> list[torch.Tensor]:
    return [*upstream.divide_each(xs, number)] if _are_plain(xs) else [x / number for x in xs]


def _are_plain(xs: Sequence[torch.Tensor]) -> bool:
    """Whether these are plain numbers, for one operation on all of them."""
    if not xs or upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0:
        return False
    return {*map(type, xs)} == {torch.Tensor} and {*map(_layout, xs)} == {torch.strided}


def added(totals: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], weight: Any) -> bool:
    """Adds weight times xs to the sums in place; False if that is not possible."""
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
    """`(treedef, sums, weight, dtypes)` over all processes, which first compare structures."""
    # Imported here, since importing torch.distributed is slow and few programs use it.
    from gradtools.torch.gathering import add_over_ranks_, check_group, values_of_ranks

    check_group(_MEAN, axis_name, group)
    if upstream.peek_interpreter_stack() is not None:
        raise GradtoolsError(
            f"{_MEAN}: sums over processes are taken outside of torch.func's transforms. Use "
            "mean() inside, and add its result to an accumulator outside."
        )
    layout = None
    if own is not None:
        kinds = ["DTensor" if is_distributed(x) else _short(x.layout) for x in own.totals]
        pairs = zip(kinds, own.totals, strict=True)
        leaves = [(kind, _short(x.dtype), tuple(x.shape)) for kind, x in pairs]
        tree = _described(trees.unflatten(own.treedef, [*range(len(leaves))]))
        device = own.totals[0].device.type if own.totals else "cpu"
        layout = _Layout(own.paths, leaves, own.dtypes, tree, device)
    weight = 0 if own is None else own.weight
    sent = values_of_ranks((layout, float(weight) if isinstance(weight, float) else weight), group)
    ranks = [(layout and _Layout.received(*layout), weight) for layout, weight in sent]
    _check_ranks(ranks)
    weights = [weight for _, weight in ranks]
    first = next(layout for layout, _ in ranks if layout is not None)
    if own is None:
        treedef, dtypes = trees.flatten(_tree_of(first.tree))[1], first.dtypes
        totals = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=first.device)
            for _, dtype, shape in first.leaves
        ]
    else:
        treedef, totals, dtypes = own.treedef, list(own.totals), own.dtypes
    add_over_ranks_([x for x in totals if not is_distributed(x)], group)
    for x in totals:  # a DTensor is the same on all ranks, so its sum is a multiple
        if is_distributed(x):
            x *= len(weights)
    return treedef, totals, sum(weights), dtypes


_MEAN = "GradientAccumulator.mean"


class _Layout(NamedTuple):
    """The structure of a process's sums."""

    paths: Sequence[str]
    leaves: Sequence[tuple[str, str, tuple[int, ...]]]  # the kind, dtype and shape of each
    dtypes: Sequence[str]  # in which the sums are read
    tree: Any  # as `_described` returns it, for a process without sums
    device: str  # the device's type

    @classmethod
    def received(cls, paths: Any, leaves: Any, *others: Any) -> _Layout:
        """The layout that another process sent as JSON, which has lists for tuples."""
        return cls(paths, [(kind, dtype, tuple(shape)) for kind, dtype, shape in leaves], *others)


def _described(tree: Any) -> Any:
    """A tree of dicts with text as keys, lists and tuples in terms of JSON; None for others."""
    if type(tree) in (int, type(None)):
        return [tree]
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        parts: Any = {key: _described(part) for key, part in tree.items()}
        return None if None in parts.values() else parts
    if type(tree) in (list, tuple):
        parts = [_described(part) for part in tree]
        return None if None in parts else [type(tree).__name__, parts]
    return None


def _tree_of(described: Any) -> Any:
    if isinstance(described, dict):
        return {key: _tree_of(part) for key, part in described.items()}
    if len(described) == 1:
        return described[0]
    parts = [*map(_tree_of, described[1])]
    return parts if described[0] == "list" else tuple(parts)


def _check_ranks(ranks: Sequence[tuple[_Layout | None, Any]]) -> None:
    """Raises, on all processes equally, unless their sums can be added."""
    layouts = [(rank, layout) for rank, (layout, _) in enumerate(ranks) if layout is not None]
    if not layouts:
        raise GradtoolsError(
            f"{_MEAN}: nothing has been added on any rank, so there is no mean. Call add(grads) "
            "first."
        )
    first, expected = layouts[0]
    for rank, layout in layouts[1:]:
        for ours, theirs in zip_longest(
            zip(expected.paths, expected.leaves, strict=True),
            zip(layout.paths, layout.leaves, strict=True),
        ):
            if ours != theirs:
                raise GradtoolsError(
                    f"{_MEAN}: rank {rank} holds {_in_words(theirs)} where rank {first} holds "
                    f"{_in_words(ours)}. Add gradients of one structure on all ranks; where a "
                    "parameter got none, add zeros."
                )
    kinds, empty = {kind for kind, _, _ in expected.leaves}, len(layouts) < len(ranks)
    if kinds - {"strided", "DTensor"} or (empty and ("DTensor" in kinds or not expected.tree)):
        raise GradtoolsError(
            f"{_MEAN}: sums of kind {', '.join(sorted(kinds))} cannot be added over ranks"
            f"{' of which one holds nothing' if empty else ''}. Give dense gradients"
            f"{', and add zeros with weight 0 on each rank without tokens' if empty else ''}."
        )
    if "DTensor" in kinds and len({weight for _, weight in ranks}) > 1:
        raise GradtoolsError(
            f"{_MEAN}: the ranks gave weights {[w for _, w in ranks]} to a DTensor, which is one "
            "gradient of all of them. Give add() the weight of all ranks, the same on each, and "
            "scale each rank's loss by its own share of it before backward()."
        )


def _in_words(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    path, (kind, dtype, shape) = leaf
    return f"grads{path}, {kind} {dtype} of shape {shape}"


def is_distributed(x: Any) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


# --- what is written, and how ------------------------------------------------------------


def _addition(p: torch.Tensor, g: torch.Tensor, buffers: set[Any]) -> Write:
    """The write that adds g. buffers: The memory of all gradients that are about to be written."""
    memory, old = _memory(g), p.grad
    if memory is not None and memory in buffers:
        g = g.clone()
    if old is None:
        return _set, p, g.clone()
    # In place without a graph, and if no entries overlap.
    writable = not (old.requires_grad or old.is_inference())
    if writable and old.layout == torch.strided:
        sizes = zip(old.shape, old.stride(), strict=True)
        writable = all(stride != 0 or n <= 1 for n, stride in sizes)
    if writable and old.layout in (torch.strided, g.layout):
        return torch.Tensor.add_, old, g
    return _set, p, g + old.detach() if old.layout != torch.strided else old.detach() + g


def _taken(merged: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The gradients without their graphs, as autograd would put them into `.grad`.

    Copies if one of them shares memory with another, and of those whose own entries do.
    """
    grads = [g.detach() for _, g in merged]
    dense = all(g.layout is torch.strided and g.is_contiguous() for g in grads)
    memory = [*map(_memory, grads)] if dense else []
    if dense and len({*memory} - {None}) == len(memory):
        return grads
    return [g.clone() for g in grads]


def _set(p: torch.Tensor, new: torch.Tensor) -> None:
    p.grad = new


def _memory(x: torch.Tensor) -> Any:
    """The address of x's storage; None if x has none (sparse, wrapped, fake)."""
    try:
        return x.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


# --- checks ------------------------------------------------------------------------------


def _check(caller: str, entry: TargetLeaf) -> None:
    p, g, path = entry.target, entry.grad, entry.path
    if _fits(p, g):
        return
    name = with_article(type(g if isinstance(p, torch.Tensor) else p).__name__)
    if not isinstance(p, torch.Tensor):
        came, expected, fix = f"target{path} is {name}", "a leaf tensor", "Give parameters."
    elif not isinstance(g, torch.Tensor):
        came, expected, fix = f"grads{path} is {name}", "a tensor", "Convert it with asarray."
    elif _is_traced(p) or _is_traced(g):
        raise GradtoolsError(
            f"{caller}: grads{path} belongs to a torch.func transform that is still running; .grad "
            "would outlive it. Return the gradients from the transformed function and write them "
            "outside."
        )
    elif not p.is_leaf:
        came, expected = (
            f"target{path} is the result of {type(p.grad_fn).__name__}",
            "a leaf tensor",
        )
        fix = "Give the parameter it was computed from; an intermediate result keeps no .grad."
    elif not (p.is_floating_point() or p.is_complex()):
        came = f"target{path} is {_short(p.dtype)} of shape {tuple(p.shape)}"
        expected = "a floating or complex tensor"
        fix = "Leave it out of grads, or put None there."
    elif not p.requires_grad:
        came = f"target{path} has requires_grad=False"
        expected = "a tensor that requires grad"
        fix = "Call requires_grad_() on the module's own parameter (make_functional returns "
        fix += "detached aliases), or leave its name out of grads."
    else:
        dtype = _expected_dtype(p, g)
        if g.shape == p.shape and g.dtype == dtype and g.device == p.device:
            return
        came = f"grads{path} is {spec_in_words(spec(g))}"
        expected = f"{_short(dtype)} of shape {tuple(p.shape)} on {p.device}, as the parameter"
        fix = f"Convert it with .to({dtype}), or set the parameter's grad_dtype."
        if g.device != p.device:
            fix = f"Move it with .to({str(p.device)!r})."
        if g.shape != p.shape:
            fix = "Reduce it over the batch first, or give it under another name."
    refuse(caller, came, expected, fix)


def _all_fit(merged: Sequence[tuple[Any, Any]]) -> bool:
    """Whether `_fits` holds of each pair: property by property, which is faster."""
    ps, gs = [p for p, _ in merged], [g for _, g in merged]
    if not ({*map(type, gs)} <= {torch.Tensor} and {*map(type, ps)} <= {*_PLAIN}):
        return False
    if any(map(_is_traced, ps)) or any(map(_is_traced, gs)):
        return False
    if not all(p.requires_grad and p.is_leaf for p in ps):
        return False
    properties = attrgetter("shape"), attrgetter("device")
    alike = all([*map(of, ps)] == [*map(of, gs)] for of in properties)
    return alike and [*map(_expected_dtype, ps, gs)] == [*map(_dtype, gs)]


def _fits(p: Any, g: Any) -> bool:
    """Whether p is an ordinary leaf and g its gradient: the fast path of `_check`."""
    if type(g) is not torch.Tensor or type(p) not in _PLAIN or not (p.is_leaf and p.requires_grad):
        return False
    alike = g.shape == p.shape and g.dtype == _expected_dtype(p, g) and g.device == p.device
    return alike and not (_is_traced(p) or _is_traced(g))


def _expected_dtype(p: torch.Tensor, g: torch.Tensor) -> torch.dtype:
    """`p.grad_dtype`, its own before PyTorch 2.10; where that allows any, what `.grad` has now."""
    return getattr(p, "grad_dtype", p.dtype) or (g.dtype if p.grad is None else p.grad.dtype)


def _short(name: Any) -> str:
    return str(name).removeprefix("torch.")
