"""PyTorch's own limits that random compositions meet, each in its least program.

A test here fails when the issue is mended: then its entry in `limits.py` goes.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.strategies.limits import LIMITS


def kept(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.sin, x, use_reentrant=False)


def refused(says: str) -> pytest.RaisesExc:
    """What plain PyTorch raises, which an entry of the table explains."""
    assert says in {limit.says for limit in LIMITS}
    return pytest.raises(Exception, match=says)


def test_what_is_checkpointed_under_vmap_is_not_computed_again_outside():
    """pytorch#165880."""
    x = torch.ones(3, requires_grad=True)
    value = torch.func.vmap(kept)(x).sum()
    with refused("escaped from inside a function being vmapped"):
        torch.autograd.grad(value, x)


def test_transforms_do_not_take_a_checkpoint():
    """pytorch#122729."""
    with refused("don't yet support saved tensor hooks"):
        torch.func.grad(lambda x: kept(x).sum())(torch.ones(3))
