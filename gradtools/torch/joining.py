"""One sum for a leaf that several nodes of one backward pass reach.

Two towers that share an encoder are two nodes, and autograd adds what they give for a leaf once
both have run: until then the gradients of each are alive. Here a node hands what it has for a leaf
on to the next one that runs in the same pass, and the last one gives the sum to autograd, which
waits for all of them either way.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.modes import batchings

Tensor = torch.Tensor
_task = upstream.current_graph_task  # which call of the engine runs a node
_will_run = upstream.will_run  # in that call
_LOCK = threading.Lock()  # devices have threads of their own
_NODES: weakref.WeakSet[Any] = weakref.WeakSet()
_JOINTS: weakref.WeakValueDictionary[int, Joint]


class Joint:
    """What is handed on between the nodes of one backward pass.

    left: How many nodes are yet to give their part of a leaf, by the leaf's id.
    sums: What those that have run gave, and the stream on which it is computed.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.left = Counter(id(x) for node in nodes for x in node.leaves)
        self.sums: dict[int, tuple[Tensor, Any]] = {}

    def handed(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """What earlier nodes gave for these leaves, which is the caller's from now on."""
        if not self.sums:
            return [None] * len(leaves)
        with _LOCK:
            result = [self.sums.pop(id(x), None) for x in leaves]
        return [None if entry is None else _here(*entry) for entry in result]

    def handed_on(self, leaves: Sequence[Tensor], grads: Sequence[Any]) -> list[Any]:
        """Of gradients those that nobody adds to any more, for autograd; a node calls it once."""
        grads = [
            g if more is None else more if g is None else more + g
            for g, more in zip(grads, self.handed(leaves), strict=True)
        ]
        with _LOCK:
            for k, x in enumerate(leaves):
                self.left[id(x)] -= 1
                if self.left[id(x)] > 0 and grads[k] is not None:
                    self.sums[id(x)] = grads[k], _stream(grads[k])
                    grads[k] = None
        return grads


_JOINTS = weakref.WeakValueDictionary()


def join(node: Any, leaves: Sequence[Tensor]) -> None:
    """Has a node take part. The nodes that wait hold what they share, so that it goes with them.

    leaves: Its last inputs.
    """
    node.leaves, node.joints = leaves, {}
    if leaves and all(x.requires_grad for x in leaves):  # else autograd takes nothing for some
        with _LOCK:
            _NODES.add(node)


def joint_of(node: Any) -> Joint | None:
    """What the nodes of this backward pass share; None where gradients are differentiated, say."""
    plain = upstream.peek_interpreter_stack() is None and not batchings()
    task = _task()  # none where a node is called by hand
    if task < 0 or torch.is_grad_enabled() or not plain or node not in _NODES:
        return None
    with _LOCK:
        result = _JOINTS.get(task)
        if result is None:
            nodes = [other for other in _NODES if _will_run(other)]
            result = Joint(nodes)
            for other in nodes:
                other.joints[task] = result
            _JOINTS[task] = result
        node.joints.pop(task, None)
        return result


def _stream(x: Tensor) -> Any:
    return None if x.device.type == "cpu" else torch.accelerator.current_stream(x.device)


def _here(x: Tensor, stream: Any) -> Tensor:
    """A tensor that another stream computes, once it is there."""
    here = _stream(x)
    if stream is not None and here != stream:
        here.wait_stream(stream)
        x.record_stream(here)
    return x
