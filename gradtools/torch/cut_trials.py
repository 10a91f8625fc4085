"""Whether a leaf is cut after an inner derivative, or f leaves that part of it unused.

Neither reaches an output. A second run of f, whose effects are undone, shows the calls that take a
tensor which depends on the leaf, and return none that does. If no call does so, nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import unwrapped
from gradtools.torch.open_derivatives import here
from gradtools.torch.rerunning import copied, put_back

Tensor = torch.Tensor


def cut_in(fun: Fun, leaves: Sequence[Tensor], unreached: list[int]) -> list[int]:
    """Of the leaves on which an inner derivative depends, but no output: those that are cut.

    All of them if f does not run twice.
    """
    if not unreached:
        return unreached
    around, here.opened = here.opened, []
    try:
        with (
            upstream.temporarily_clear_interpreter_stack(),  # the rows of a Jacobian
            put_back(fun, leaves),
            torch.enable_grad(),
        ):
            with upstream.DisableTorchFunction():  # another trial around this one sees no cut here
                xs = [copied(x) for x in leaves]
            with _WatchForCuts([xs[i] for i in unreached]) as cuts:
                fun(*xs)
    except Exception:  # the caller refuses, as if the run had shown each cut
        return unreached
    finally:
        here.opened = around
    return [i for k, i in enumerate(unreached) if k in cuts.found]


class _WatchForCuts(TorchFunctionMode):
    """Notes which of some leaves are cut in a call.

    Attributes:
        found: The positions of these leaves.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._behind: dict[Any, frozenset[int]] = {
            get_gradient_edge(x).node: frozenset([k])
            for k, x in enumerate(leaves)
            if x.requires_grad
        }

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if upstream.is_dispatch_key_excluded(upstream.DispatchKey.AutogradFunctionality):
            return fun(*args, **kwargs)  # a decomposition that autograd runs
        before = self._reached(upstream.tree_leaves((args, kwargs)))
        out = fun(*args, **kwargs)
        if before and not _reads_no_value(fun) and not _keeps_its_graph(fun, args, kwargs):
            self.found |= before - self._reached(upstream.tree_leaves(out))
        return out

    def _reached(self, xs: Iterable[Any]) -> set[int]:
        """The leaves on which xs or their tangents depend, beneath wrappers of torch.func."""
        result: set[int] = set()
        with upstream.DisableTorchFunction():
            tensors = [unwrapped(x) for x in xs if isinstance(x, Tensor)]
            if upstream.forward_level() >= 0:  # a dual number may have a graph at its tangent alone
                tensors = [y for x in tensors for y in unpack_dual(x) if y is not None]
            for y in tensors:
                if y.requires_grad:
                    result |= self._leaves_behind(get_gradient_edge(y).node)
        return result

    def _leaves_behind(self, node: Any) -> frozenset[int]:
        """The leaves that a node leads to."""
        todo = [node]
        while todo:
            node = todo[-1]
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            left = [parent for parent in parents if parent not in self._behind]
            if node in self._behind or not left:
                todo.pop()
                behind = [self._behind[parent] for parent in parents if parent in self._behind]
                self._behind.setdefault(node, frozenset().union(*behind))
            else:
                todo += left
        return self._behind[node]


def _reads_no_value(fun: Any) -> bool:
    """Whether a function reads shapes, dtypes or flags alone."""
    name = getattr(fun, "__name__", "")
    if name == "__get__":
        return getattr(fun.__self__, "__name__", "") != "data"
    return name in _METADATA or name.startswith(("is_", "_is_")) or name.endswith("_like")


_METADATA = frozenset(
    "dim size stride numel nelement element_size storage_offset ndimension get_device has_names "
    "__len__ __hash__ __repr__ new_empty new_zeros new_ones new_full register_hook "
    "retain_grad".split()
)


def _keeps_its_graph(fun: Any, args: Any, kwargs: Any) -> bool:
    """Whether this is `torch.autograd.grad` with create_graph=True: constant results are no cut."""
    if fun is not torch.autograd.grad:
        return False
    return bool(kwargs.get("create_graph", args[4] if len(args) > 4 else False))
