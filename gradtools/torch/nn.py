"""Defines the layer `GradientReversal` for ``torch.nn`` models.

The forward pass is the identity; the backward pass multiplies by -scale. The layers before
`GradientReversal` maximize the loss that the layers after it minimize (Ganin and Lempitsky, ICML
2015, arXiv:1409.7495).
"""

from typing import Any

from torch import nn

import gradtools.torch as gt
from gradtools.edits import check_reversal


class GradientReversal(nn.Module):
    """Returns its input; multiplies the gradient by ``-scale``.

    Args:
        scale: A real number, not a parameter or a buffer. Assign a new scale between calls to apply
            a schedule.

    Example:
        >>> import torch
        >>> from gradtools.torch.nn import GradientReversal
        >>> x = torch.ones(2, requires_grad=True)
        >>> GradientReversal(scale=0.5)(x).sum().backward()
        >>> x.grad
        tensor([-0.5000, -0.5000])
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        check_reversal("GradientReversal", scale)
        self.scale = scale

    def forward(self, x: Any, scale: Any = None) -> Any:
        """Returns x, a tensor or a pytree of tensors, unchanged.

        ``scale``, if given, replaces the layer's scale.
        """
        return gt.reverse_gradient(x, self.scale if scale is None else scale)

    def extra_repr(self) -> str:
        """Returns the arguments for ``repr``."""
        return f"scale={self.scale}"
