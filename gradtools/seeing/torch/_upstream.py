"""Imports private names of PyTorch that only the recorders use, and explains their use.

See `gradtools.torch._upstream` for the other names.
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
"""Disables function modes, so attributes are read from the tensor itself.

Among the names imported above, HigherOrderOperator is the class of operators such as cond, and
custom_function_call is the operator that torch.func calls instead of `Function.apply`.
"""


class Watching(TorchDispatchMode):
    """A dispatch mode that does not import dynamo, whose import takes longer than a run.

    The mode never runs inside of compiled code.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_SHARES_APPLY = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
_OTHERS: Any = () if _SHARES_APPLY else (torch.autograd.Function,)
Functions: tuple[Any, ...] = (function._SingleLevelFunction, *_OTHERS)
"""The classes whose `apply` is patched, so that calls through a stored reference to
`Function.apply` are also recorded. Since PyTorch 2.14 `torch.autograd.Function` has its own `apply`
in C."""


def is_inside_autograd() -> bool:
    """Returns whether autograd dispatched the running operation.

    The result is False if autograd itself detaches a saved tensor.
    """
    excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
    return excluded(torch._C.DispatchKey.AutogradFunctionality)


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the running backward node, which identifies the forward operation."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Returns the schema of an operator: its name and the names of its arguments."""


def described(node: Any) -> Sequence[Any]:
    """Returns the shape, dtype and device of each output of an autograd node."""
    described: Sequence[Any] = getattr(node, "_input_metadata", ())
    return described


def decompositions() -> Any:
    """Lazily imports and returns PyTorch's operator decompositions, whose import is slow."""
    from torch._decomp import decomposition_table

    return decomposition_table
