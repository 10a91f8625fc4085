"""All that a function's result depends on besides its arguments, so that it can be run again.

A snapshot holds where the random streams stand and what can change behind a function: the
buffers and attributes of modules, containers, closure variables and globals that it can reach,
generators. What is reached is found by a walk (`reaching`); a tensor's contents are copied only
where they belong to a module, for others it is noticed if they changed.

Snapshots of one function follow each other, and mostly nothing changed in between. So a snapshot
is taken from an earlier one where it can: if every holder still holds the very same objects, the
walk is spared, and contents whose bits are the same are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.randomness import Randomness
from gradtools.torch.reaching import ATOMS, Reached, walk

Tensor = torch.Tensor
left_to_python(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What can change behind a function, as it stood.

    Attributes:
        streams: The random streams of the process.
        reached: The objects that were reached, and what they held.
        versions: Those of the tensors that are watched.
    """

    streams: Randomness
    reached: Reached
    versions: list[int]
    _contents: list[Tensor]
    _states: list[Any]

    @classmethod
    def of(
        cls, roots: Iterable[Any], tensors: Iterable[Tensor], like: Snapshot | None = None
    ) -> Snapshot:
        """What stands behind `roots` now.

        tensors: Those whose devices' random streams count, besides those that are found.
        like: An earlier one with all its streams, which is shared as far as nothing changed since.
        """
        roots = [x for x in roots if type(x) not in ATOMS]
        kinds = {x.device.type for x in tensors}
        if like is not None and like.reached.starts_from(roots, kinds) and like.reached.stands():
            return like._taken_again(like.streams.again())
        return cls._walked(roots, kinds)

    @classmethod
    def _walked(cls, roots: list[Any], kinds: set[str]) -> Snapshot:
        reached = walk(roots, kinds)
        return cls(
            Randomness.everywhere(reached.kinds),
            reached,
            reached.versions(),
            [x.detach().clone() for x in reached.owned],
            [get() for get, _ in reached.generators],
        )

    def now(self) -> Snapshot:
        """What stands now behind all that was reached; this one where nothing changed."""
        streams = self.streams.again()
        if self.reached.stands():
            return self._taken_again(streams)
        return replace(self, reached=self.reached.now())._taken_again(streams)

    def watched_now(self) -> list[tuple[Tensor, str]]:
        """The tensors that can be reached now, with their names."""
        return walk(self.reached.roots, self.reached.kinds).watched

    def _taken_again(self, streams: Randomness) -> Snapshot:
        reached = self.reached
        versions = reached.versions()
        changed = _changed(reached.owned, self._contents)
        contents, states = self._contents, [get() for get, _ in reached.generators]
        if any(changed):
            triples = zip(reached.owned, contents, changed, strict=True)
            contents = [x.detach().clone() if c else old for x, old, c in triples]
        if versions == self.versions:
            versions = self.versions
        if (
            contents is self._contents
            and not states
            and streams is self.streams
            and versions is self.versions
        ):
            return self
        return Snapshot(streams, reached, versions, contents, states)

    def without_unused_streams(self) -> Snapshot:
        """The same after the function has run, less the streams that it drew nothing from."""
        return replace(self, streams=self.streams.used())

    def restore(self) -> None:
        """Puts everything back, bit for bit."""
        reached = self.reached
        if not reached.stands():
            reached.restore()
        changed = _changed(reached.owned, self._contents)
        for tensor, contents, differs in zip(reached.owned, self._contents, changed, strict=True):
            if differs:
                _put_back(tensor, contents)
        for (_, put), state in zip(reached.generators, self._states, strict=True):
            put(state)
        self._restore_versions()
        self.streams.restore()

    def _restore_versions(self) -> None:
        """Of those that hold again what they held, so that a graph which saved them is good."""
        pairs = zip(self.reached.watched, self.versions, strict=True)
        moved = [(x, version) for (x, _), version in pairs if upstream.version_of(x) != version]
        if moved:
            held = {id(x) for x in self.reached.owned}
            _set_versions([(x, version) for x, version in moved if id(x) in held])

    def changed(self, parameters: bool) -> list[str]:
        """The names of tensors that were changed in place since, and cannot be put back."""
        reached = self.reached
        if reached.versions() == self.versions:
            return []
        held = {id(x) for x in reached.owned}
        return [
            name
            for (x, name), version in zip(reached.watched, self.versions, strict=True)
            if upstream.version_of(x) != version
            and id(x) not in held
            and (parameters or not x.requires_grad)
        ]

    def name_of(self, wanted: Callable[[Tensor], bool]) -> str | None:
        """The name of a watched tensor."""
        return next((name for x, name in self.reached.watched if wanted(x)), None)


def _set_versions(pairs: list[tuple[Tensor, int]]) -> None:
    if pairs:
        tensors, versions = zip(*pairs, strict=True)
        upstream.set_version_counters(tensors, versions)


def _put_back(tensor: Tensor, contents: Tensor) -> None:
    """Has a tensor hold again what it held.

    The version counts changes that a graph must know of; this is none, for the contents are what
    they were or will be again before anything else reads them.
    """
    counted = not tensor.is_inference()
    uncounted = upstream.version_counter_kept(tensor) if counted else torch.inference_mode()
    with torch.no_grad(), uncounted:
        if tensor.shape != contents.shape:
            tensor.resize_(contents.shape)
        if tensor.layout is torch.strided and 0 in tensor.stride():
            once = tuple([slice(None if stride else 1) for stride in tensor.stride()])
            tensor, contents = tensor[once], contents[once]
        tensor.copy_(contents)


def _changed(tensors: list[Tensor], contents: list[Tensor]) -> list[bool]:
    """Whether tensors' contents are other bits than these copies; asked once for each device."""
    if not tensors or upstream.peek_interpreter_stack() is not None:
        return [True] * len(tensors)  # nothing can be asked of numbers in a transform
    asked: list[Any] = [_differs(x, c) for x, c in zip(tensors, contents, strict=True)]
    for device in {x.device for x in asked if isinstance(x, Tensor)}:
        which = [k for k, x in enumerate(asked) if isinstance(x, Tensor) and x.device == device]
        for k, differs in zip(which, torch.stack([asked[k] for k in which]).tolist(), strict=True):
            asked[k] = differs
    return asked


def _differs(x: Tensor, copy: Tensor) -> bool | Tensor:
    """On an accelerator the answer stays there, for it to be waited for once."""
    plain = type(x) in _PLAIN and x.layout is torch.strided and not (x.is_conj() or x.is_neg())
    alike = x.shape == copy.shape and x.dtype == copy.dtype and x.device == copy.device
    if not (plain and alike) or x.is_quantized:
        return True
    a, b = _bits(x.detach()), _bits(copy)
    if x.device.type == "cpu":
        return not torch.equal(a, b)
    return a.ne(b).any()


_PLAIN = (Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, in which NaN is itself and -0.0 is not 0.0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_INTEGERS[x.itemsize]) if x.is_floating_point() else x
