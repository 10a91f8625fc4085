"""Implements collectives in PyTorch: a differentiable `all_gather`, and sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.compiling import left_to_python
from gradtools.torch.modes import batchings
from gradtools.torch.rules.functions import BatchedRule
from gradtools.torch.rules.installing import apply_rule

Tensor = torch.Tensor
left_to_python(__name__)


def all_gather(x: Any, axis_name: Any, group: Any) -> Any:
    """Concatenates the rows of x from all processes of the group. See `gradtools.gathering`."""
    check_group("all_gather", axis_name, group)
    leaves, treedef = trees.flatten(x)
    return trees.unflatten(treedef, [_gathered(leaf, group) for leaf in leaves])


def check_group(caller: str, axis_name: Any, group: Any) -> None:
    """Raises an error if there is no process group, or if axis_name is given."""
    if axis_name is not None:
        raise GradtoolsError(
            f"{caller}: axis_name is an argument for JAX; in PyTorch pass group, or omit it."
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise GradtoolsError(
            f"{caller}: there is no process group. Call torch.distributed.init_process_group "
            "first; a single process already has all rows."
        )


def values_of_ranks(value: Any, group: Any) -> list[Any]:
    """Returns the `value` of each process of a group or DeviceMesh."""
    values = [value]
    for each in _groups_of(group):
        values = [x for row in _of_all(values, each) for x in row]
    return values


def add_over_ranks_(xs: Sequence[Tensor], group: Any) -> None:
    """Replaces each tensor in place with its sum over the processes.

    The tensors must have no graph.
    """
    for each in _groups_of(group):
        works = [dist.all_reduce(x, group=each, async_op=True) for x in xs]
        for work in works:
            if work is not None:  # None if this process does not belong to the group
                work.wait()


def _groups_of(group: Any) -> list[Any]:
    """Returns `[group]`, or the groups along all dimensions if `group` is a DeviceMesh."""
    return group.get_all_groups() if hasattr(group, "get_all_groups") else [group]


def _gathered(x: Any, group: Any) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim == 0:
        came = type(x).__name__ if not isinstance(x, Tensor) else "tensor of shape ()"
        raise GradtoolsError(f"all_gather: got a {came}; expected tensors with rows along axis 0.")
    if x.layout is not torch.strided or x.is_nested:
        raise GradtoolsError(
            "all_gather: a sparse or nested tensor has no contiguous rows. Pass a dense tensor."
        )
    shapes = _of_all(f"{tuple(x.shape)} of {x.dtype}", group)
    if any(shape != shapes[0] for shape in shapes):
        raise GradtoolsError(
            f"all_gather: the processes pass different shapes or dtypes: {', '.join(shapes)}. Pad "
            "the rows to the same length, and exclude the padding from the loss."
        )
    return _all_rows_of(x, group)


def _of_all(value: Any, group: Any) -> list[Any]:
    """Gathers `value` from all processes of the group, outside of torch.func's transforms."""
    size = dist.get_world_size(group)
    if size < 1:  # this process does not belong to the group
        return []
    values: list[Any] = [None] * size
    with upstream.temporarily_clear_interpreter_stack(), torch.no_grad():
        dist.all_gather_object(values, value, group)
    return values


# --- linear maps and their adjoints --------------------------------------------------------------


def _all_rows_of(x: Tensor, group: Any) -> Tensor:
    def value(x: Tensor, group: Any) -> Tensor:
        x = _in_memory(x).contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group)
        return torch.cat(parts)

    return _linear(value, _all_rows_of, _own_rows_of, x, group)


def _own_rows_of(x: Tensor, group: Any) -> Tensor:
    """Returns the rows of this process in the sum of x over processes."""

    def value(x: Tensor, group: Any) -> Tensor:
        total = _in_memory(x).clone(memory_format=torch.contiguous_format)
        add_over_ranks_([total], group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    return _linear(value, _own_rows_of, _all_rows_of, x, group)


def _linear(value: Any, forth: Any, back: Any, x: Tensor, group: Any) -> Tensor:
    """Applies a linear collective as a rule. Under vmap, the batch axis is an axis of each row."""

    def along(linear: Any, _: Any, vs: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if v is None else linear(v, group) for v in vs]

    def batching_rule(size: int, axes: Any, xs: Sequence[Tensor], randomness: str) -> Any:
        return rule, [xs[0].movedim(axes[0], 1)], lambda outs: (1,)

    def primal(x: Tensor) -> list[Tensor]:
        if batchings() > 0:
            raise GradtoolsError(
                "all_gather: a batch of cotangents (is_grads_batched=True, vectorize=True) cannot "
                "be sent to other processes. Use gt.jacobian, or torch.func's transforms."
            )
        return [value(x, group)]

    rule = BatchedRule(
        "all_gather",
        primal,
        partial(along, forth),
        partial(along, back),
        saves=(),
        batching_rule=batching_rule,
    )
    return apply_rule(rule, x)[0]


def _in_memory(x: Tensor) -> Tensor:
    """Materializes lazy conjugation and negation of x, since collectives send raw memory."""
    return x.resolve_conj().resolve_neg()
