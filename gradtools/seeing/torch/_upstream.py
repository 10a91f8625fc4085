"""The private names of PyTorch that recorders alone use, each with its reason.

See `gradtools.torch._upstream`, which has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch._functorch.autograd_function import custom_function_call as custom_function_call
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.autograd import function
from torch.utils._python_dispatch import TorchDispatchMode

DisableTorchFunction: Any = torch._C.DisableTorchFunction
"""Reads attributes of the tensor itself, not of a tensor that a mode substitutes for it.

Among the names that are imported above, HigherOrderOperator is the class of operators such as cond,
and custom_function_call is the operator that torch.func calls in place of `Function.apply`.
"""


class Watching(TorchDispatchMode):
    """A dispatch mode that does not import dynamo, an import slower than any code under the mode.

    It never runs inside of compiled code.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_SHARES_APPLY = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
_OTHERS: Any = () if _SHARES_APPLY else (torch.autograd.Function,)
Functions: tuple[Any, ...] = (function._SingleLevelFunction, *_OTHERS)
"""The classes whose `apply` a recorder patches, so that it also sees a bound `Function.apply`. From
PyTorch 2.14 on `torch.autograd.Function` has an `apply` of its own in C."""


def is_inside_autograd() -> bool:
    """Whether an operation was dispatched by autograd, unlike the detach of a tensor it saves."""
    excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
    return excluded(torch._C.DispatchKey.AutogradFunctionality)


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward runs, whose operations get the source line of the forward pass."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's name and arguments."""


def described(node: Any) -> Sequence[Any]:
    """The shape, dtype and device of each output of a node."""
    described: Sequence[Any] = getattr(node, "_input_metadata", ())
    return described


def decompositions() -> Any:
    """PyTorch's own decompositions of operators; the import takes a second."""
    from torch._decomp import decomposition_table

    return decomposition_table
