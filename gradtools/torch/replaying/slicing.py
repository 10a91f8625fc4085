"""Each chunk's part of every argument, and tensors as leaves of a chunk's own graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import increment_version

from gradtools.arguments.chunks import Chunks
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_dual, is_inexact, is_wrapped
from gradtools.torch.operation_marks import CHUNK, data_of, detached
from gradtools.torch.state import is_other

left_to_python(__name__)

Tensor = torch.Tensor
Entries = Sequence[Any]  # tensors, or None
Rows = list[list[Any]]  # one for each chunk


def flattened(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [*chain.from_iterable(rows)]


def pieces_of(chunks: Chunks, own_versions: bool = True) -> list[list[Any]]:
    """Each chunk's part of every array that is split, then its part of lists.

    own_versions: Whether the pieces have version counters of their own, so that in-place changes
        of one do not invalidate the graphs of others, if several live at a time.
    """

    def one(x: Any) -> Any:
        if not own_versions or upstream.is_exporting():  # which does not trace `.data`
            return x
        plain = isinstance(x, Tensor) and not (x.requires_grad or x.is_inference() or is_wrapped(x))
        return data_of(x, CHUNK) if plain and not is_dual(x) else x

    columns = [_parts(chunks, x, axis, one) for x, axis in chunks.splits]
    return [
        [*(column[i] for column in columns), *map(one, chunks.lists[i])]
        for i in range(chunks.cut.count)
    ]


def _parts(chunks: Chunks, x: Tensor, axis: int, one: Callable[[Any], Any]) -> Sequence[Tensor]:
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else f"sparse ({str(x.layout).removeprefix('torch.')})"
        raise GradtoolsError(
            f"{chunks.caller}: an argument that is split is a {kind} tensor, which has "
            "no axis to cut on. Give its dense form, or share it (None in in_axes)."
        )
    cut, tracked = chunks.cut, x.requires_grad or is_wrapped(x)
    if tracked and cut.interleaved:  # one node for all, whose backward pass is one scatter
        x = x.index_select(axis, torch.tensor(flattened(cut.rows), device=x.device))
    if tracked:
        return x.split(cut.sizes, axis)
    before = (slice(None),) * axis
    return [one(x[*before, rows.start : rows.stop : rows.step]) for rows in cut.rows]


class Originals:
    """Copies of the pieces that f changes in place, from which they are recomputed.

    Pieces that are inputs of the node are none of these: f may change its alias only.

    Args:
        chunks: The call.
        pieces: Each chunk's part of every argument.
        moving: For each chunk, which of its pieces are inputs of the node.
        recomputes: Whether chunks are recomputed; without it nothing is kept.
    """

    def __init__(
        self, chunks: Chunks, pieces: Rows, moving: list[list[int]], recomputes: bool
    ) -> None:
        self._chunks, self._pieces, self._moving = chunks, pieces if recomputes else [], moving
        self._copies: dict[int, dict[int, Tensor]] = {}
        count = len(chunks.splits)  # pieces of lists are arguments of their own
        every = [(i, k) for i, row in enumerate(self._pieces) for k in range(len(row))]
        fixed = [(i, k) for i, k in every if k not in moving[i] and (i == 0 or k >= count)]
        self._sources = [x for i, k in fixed if _may_change(x := self._source(i, k))]
        self._versions = [*map(upstream.version_of, self._sources)]

    def __bool__(self) -> bool:
        return bool(self._copies)

    def of(self, i: int) -> dict[int, Tensor]:
        """Fresh copies for chunk i, by the pieces' positions."""
        return {k: x.clone() for k, x in self._copies.get(i, {}).items()}

    @contextmanager
    def noted(self, i: int, checks: bool) -> Iterator[None]:
        """Context in which f runs at chunk i: stores the pieces that it changes in place.

        checks: Whether to raise if f changed one by another name, which changes no version.
        """
        pieces, moving = self._pieces[i] if self._pieces else (), self._moving[i]
        before = [
            (k, x, x.clone(), upstream.version_of(x))
            for k, x in enumerate(pieces)
            if k not in moving and _may_change(x)
        ]
        yield
        for k, x, original, version in before:
            if upstream.version_of(x) != version:
                self._copies.setdefault(i, {})[k] = original
            elif checks and is_other(x, original):
                raise self._written_elsewhere()

    def settle(self) -> None:
        """Raises if an argument was changed by another name; counts the changes of pieces."""
        if [*map(upstream.version_of, self._sources)] != self._versions:
            raise self._written_elsewhere()
        for i, changed in self._copies.items():
            increment_version([self._source(i, k) for k in changed])

    def _source(self, i: int, k: int) -> Any:
        """The argument of which piece k of chunk i is a slice."""
        splits = self._chunks.splits
        return splits[k][0] if k < len(splits) else self._chunks.lists[i][k - len(splits)]

    def _written_elsewhere(self) -> GradtoolsError:
        return GradtoolsError(
            f"{self._chunks.caller}: f changes in place, by another name, an argument that is "
            "split: a tensor that f closes over, a buffer of its module, or memory shared with "
            "NumPy. The gradient would be taken at the changed numbers. Clone the argument first."
        )


def _may_change(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_inference()


def tensors_of(xs: Entries) -> list[Tensor]:
    return [x for x in xs if isinstance(x, Tensor)]


def primal_of(x: Any) -> Any:
    """A dual number's primal; anything else unchanged."""
    return forward_ad.unpack_dual(x).primal if is_dual(x) else x


def untracked(x: Any) -> Any:
    return detached(x, CHUNK) if isinstance(x, Tensor) else x


def is_observed() -> bool:
    """Whether a mode may record a detach, which then needs a mark of its origin."""
    return bool(upstream.count_of_dispatch_modes() or upstream.count_of_function_modes())


def alias_of(x: Tensor) -> Tensor:
    """x as a new leaf that requires grad; integers unchanged."""
    if not is_inexact(x):
        return x
    if not (torch.is_inference_mode_enabled() or x.is_inference()):
        if upstream.forward_level() < 0 and not is_observed():
            return x.detach().requires_grad_()
        return detached(primal_of(x), CHUNK).requires_grad_()
    with torch.inference_mode(False):
        x = x.clone() if x.is_inference() else detached(primal_of(x), CHUNK)
        return x.requires_grad_()


def as_input(x: Tensor) -> Tensor:
    """As `view_of`, but dual and sparse tensors become leaves."""
    return view_of(x) if x.layout is torch.strided and not is_dual(x) else alias_of(x)


def view_of(x: Tensor) -> Tensor:
    """A view of x in its graph if x requires grad, else a new leaf."""
    return x[...] if x.requires_grad else alias_of(x)  # view_as changes strides
