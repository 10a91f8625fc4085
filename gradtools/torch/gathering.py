"""The rows of all processes, differentiable in any order and mode."""

from __future__ import annotations

from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.torch import trees

Tensor = torch.Tensor


def gather(x: Any, axis_name: Any, group: Any) -> Any:
    """All processes' rows. See `gradtools.chunking`."""
    import torch.distributed as dist

    if axis_name is not None:
        raise GradtoolsError(
            "gather: axis_name belongs to JAX; in PyTorch give a process group, or nothing."
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise GradtoolsError(
            "gather: there is no process group. Call torch.distributed.init_process_group first; "
            "a single process has all rows already."
        )
    leaves, treedef = trees.flatten(x)
    return trees.unflatten(treedef, [_gathered(leaf, group) for leaf in leaves])


def _gathered(x: Any, group: Any) -> Tensor:
    import torch.distributed as dist

    if not isinstance(x, Tensor) or x.ndim == 0:
        raise GradtoolsError("gather: expected tensors with rows along axis 0.")
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, (tuple(x.shape), str(x.dtype)), group)
    if len(set(shapes)) > 1:
        raise GradtoolsError(
            f"gather: the processes hold different shapes or dtypes: {shapes}. Pad the rows to "
            "one length, and leave the padding out of the loss."
        )
    return _Gather.apply(x, group)


class _Gather(torch.autograd.Function):
    """All rows; its adjoint adds up what all processes ask of one's own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        import torch.distributed as dist

        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return _SumOfOwn.apply(ct, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: None) -> Tensor:
        return _Gather.apply(dx, ctx.group)


class _SumOfOwn(torch.autograd.Function):
    """One's own rows of the sum over processes: the adjoint of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, ct: Tensor, group: Any) -> Tensor:
        import torch.distributed as dist

        ctx.group = group
        total = ct.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, c: Tensor) -> Any:
        return _Gather.apply(c, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, dct: Tensor, _: None) -> Tensor:
        return _SumOfOwn.apply(dct, ctx.group)
