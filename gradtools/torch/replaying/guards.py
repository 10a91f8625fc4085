"""Refusals, captured tensors, counted bytes and progress bars of a recomputation over chunks.

Whether f is computed again, and by whom; how far it is; how many bytes a graph keeps; modules and
captured tensors with which it cannot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from gradtools.arguments.chunks import progress_bar, warn_of_batch_norm
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_dual
from gradtools.torch.known_errors import NO_SAVED_TENSORS_HOOKS, says
from gradtools.torch.patches import functions_applied
from gradtools.torch.state import Snapshot

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

Tensor = torch.Tensor
left_to_python(__name__)
is_wrapped = upstream.is_wrapped

REPLAYS = threading.RLock()  # random streams and the leaves' hooks are the process's


class _Noted(threading.local):
    """What is noted of a thread; defaults of the class, for a miss is slow.

    Attributes:
        replaying: Whether it computes a chunk again.
        wanted: Whether the user's code has asked that since it began to.
        mark: The operator in whose way it computes, or nothing.
    """

    replaying = wanted = recorded = plain = False
    mark = ""


here = _Noted()
is_recomputing: Callable[[], bool] = partial(getattr, here, "replaying")
"""Whether this thread computes a chunk again."""
has_asked: Callable[[], bool] = partial(getattr, here, "wanted")
"""Whether the user's code has asked that since this thread began to."""
mark: Callable[[], str] = partial(getattr, here, "mark")
"""The operator in whose way this thread computes, or nothing."""
is_recorded: Callable[[], bool] = partial(getattr, here, "recorded")
is_plain: Callable[[], bool] = partial(getattr, here, "plain")


def asks_is_recomputing() -> bool:
    """As `is_recomputing`, where the user's code asks, which then may do something else."""
    here.wanted = True
    return is_recomputing()


class marked:
    """Inside runs what `caller` computes in its own way; what it is inside of has its own mark.

    An empty mark: what runs inside is the user's, whoever runs it.
    """

    def __init__(self, caller: str) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        self._before = here.mark
        here.mark = self._caller and (self._before or self._caller)

    def __exit__(self, *error: Any) -> None:
        here.mark = self._before


@contextmanager
def _noted(name: str) -> Iterator[None]:
    before = getattr(here, name)
    setattr(here, name, True)
    try:
        yield
    finally:
        setattr(here, name, before)


recorded = partial(_noted, "recorded")
"""Inside, each operation is written down, and nothing runs that is not asked for."""
plainly = partial(_noted, "plain")
"""Inside, what would be computed again is kept, as by the plain loop: f is written down."""


def steps(count: int) -> Iterator[int]:
    """The numbers of chunks, with a progress bar."""
    with progress_bar(count) as bar:
        for i in range(count):
            yield i
            bar.update()


@contextmanager
def bytes_saved(forward: Forward) -> Iterator[list[int]]:
    """Counts what a graph saves besides inputs, parameters and buffers."""
    known = [*forward.tensors, *(x for x, _ in forward.start.reached.watched)]
    for module, _ in forward.start.reached.modules.values():
        known += module.buffers()
    seen = {x.untyped_storage().data_ptr() for x in known if x.layout is torch.strided}
    size = [0]

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            size[0] += storage.nbytes()
        return x

    try:
        with saved_tensors_hooks(pack, lambda x: x):
            yield size
    except RuntimeError as error:
        if not says(error, NO_SAVED_TENSORS_HOOKS):
            raise
        raise GradtoolsError(
            f"{forward.caller}: f holds a transform of torch.func, inside of which PyTorch does "
            "not tell what graphs keep, so memory_budget cannot be held. Leave it out, or use "
            "gt.grad, gt.vjp and their like in f."
        ) from error


# --- what is refused ---------------------------------------------------------------------

_OWN_WRAPPERS = {
    "DistributedDataParallel": "It would reduce gradients once for each chunk. Wrap the other way "
    "round: DistributedDataParallel around a module whose forward calls chunked on the plain one.",
    "FullyShardedDataParallel": "Its parameters are gathered and freed around each call; use "
    "DistributedDataParallel around a module whose forward calls chunked.",
    "FSDPModule": "Its parameters are gathered and freed around each call; put fully_shard, or "
    "DistributedDataParallel, around a module whose forward calls chunked on a plain layer of it, "
    "as in chunked(self.layers, 8), so that f does not hold the sharded module itself.",
    "DataParallel": "Its replicas are new at each call; use DistributedDataParallel around a "
    "module whose forward calls chunked.",
}


def own_wrapper(module: Any) -> str | None:
    """The kind of a module of PyTorch's that has its own way with parameters."""
    kinds = [kind for kind in type(module).__mro__ if kind.__name__ in _OWN_WRAPPERS]
    return next((k.__name__ for k in kinds if k.__module__.startswith("torch.")), None)


def check_modules(caller: str, start: Snapshot, f: Any) -> None:
    """Raises for modules that chunks cannot have; tells of those that mean another thing there."""
    for module, name in start.reached.modules.values():
        kind = own_wrapper(module)
        if kind is not None:
            raise GradtoolsError(f"{caller}: {name} is a {kind}. {_OWN_WRAPPERS[kind]}")
        normalises = isinstance(module, upstream.BatchNorm)
        if caller == "chunked" and normalises and module.training:
            warn_of_batch_norm(
                ("torch", getattr(f, "__name__", type(f).__name__)), f"chunked: {name} is"
            )


def check_cached(caller: str, start: Snapshot) -> None:
    """Raises where `parametrize.cached` would have computed a weight once that changes state."""
    for module, name in start.reached.modules.values():
        if isinstance(module, ParametrizationList) and any(True for _ in module.buffers()):
            raise GradtoolsError(
                f"{caller}: {name} computes a weight by a parametrization with buffers, inside of "
                "parametrize.cached, which computes it once; here it is computed for each chunk, "
                "and its buffers would change each time. Leave parametrize.cached out."
            )


class Captures(TorchFunctionMode):
    """Refuses what f captured of a transform, which is a constant to it: the zero is silent."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.forward = forward
        # Under a batch, or a transform of its own, f sees others that are not captured.
        self.known = {id(x) for x, _ in forward.start.reached.watched if is_wrapped(x)}

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = upstream.peek_interpreter_stack() is None
        if getattr(fun, "__name__", "") == "__get__":  # a shape, say
            return fun(*args, **(kwargs or {}))
        for x in trees.flatten((args, kwargs))[0]:
            if isinstance(x, Tensor) and is_wrapped(x) and (plain or id(x) in self.known):
                raise captured_error(self.forward, x)
        return fun(*args, **(kwargs or {}))


class Substituted(TorchFunctionMode):
    """Has operations see other tensors in the place of those that a function captured."""

    def __init__(self, captured: list[Tensor], others: list[Tensor]) -> None:
        super().__init__()
        self.captured = captured  # so that no other tensor has their ids
        self.others = {id(x): other for x, other in zip(captured, others, strict=True)}

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.within((args, kwargs or {}))
        return fun(*args, **kwargs)

    def __enter__(self) -> Substituted:
        # A bound `apply` may pass by: then the graph leads on to what is captured, and is refused.
        self._functions = functions_applied(self._applied, of_rules=False)
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def _applied(self, kind: Any, beneath: Any, args: Any, kwargs: Any) -> Any:
        return beneath(*self.within(args), **kwargs)

    def within(self, tree: Any) -> Any:
        return upstream.tree_map_only(Tensor, lambda x: self.others.get(id(x), x), tree)


def captured_error(forward: Forward, what: Any) -> GradtoolsError:
    """what: The tensor, or the node that made it; None for one of a transform."""
    name = forward.start.name_of(
        lambda x: x is what or (x.grad_fn is what if what is not None else is_dual(x))
    )
    shared = ", with None in in_axes" if forward.caller == "chunked" else ""
    return GradtoolsError(
        f"{forward.caller}: f captured {'a tensor' if name is None else name!r} that is computed "
        "from others, or belongs to a transform of torch.func, and is no argument; its derivative "
        f"would be lost or counted twice. Pass it to f as an argument{shared}."
    )


def edge_error(forward: Forward, i: int, node: Any) -> GradtoolsError:
    """node: What an earlier chunk computed, with a derivative, and chunk i goes on from."""
    held = [name for x, name in forward.start.watched_now() if x.grad_fn is node]
    name = repr(held[0]) if held else "something"
    return GradtoolsError(
        f"{forward.caller}: chunk {i} goes on from {name} that an earlier chunk computed and kept "
        "attached to its graph, and one chunk's graph is all that there is at a time: a gradient "
        "would be lost. Detach what is kept between calls; compute a function of weights in each "
        "call, or before and pass it as an argument, with None in in_axes."
    )


def parameters_of(start: Snapshot) -> list[Tensor]:
    """The leaves that can be reached from f and are differentiated."""
    tensors = [x for x, _ in start.reached.watched if not is_wrapped(x)]
    return [x for x in tensors if x.requires_grad and x.is_leaf]
