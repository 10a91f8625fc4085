"""What gradtools asks of dynamo, without importing it, and what it adds to `torch.compile`.

Dynamo takes more time to import than the rest of PyTorch together, and a program that compiles
nothing never needs it. So functions that it must not look into are registered when it arrives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradtools.backend import Compiler
from gradtools.errors import GradtoolsError, warn_once
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
_OPAQUE: list[Callable[..., Any]] = []
_SKIPPED: dict[str, Callable[..., Any]] = {}
_IN_PYTHON: list[str] = []  # modules that said so of themselves


def is_compiling() -> bool:  # as PyTorch's own name, dynamo takes it for false in places
    """Whether dynamo is tracing this very line."""
    return torch.compiler.is_dynamo_compiling()


def opaque_to_dynamo(fun: F) -> F:
    """Marks `fun` as one node of a compiled graph (`torch.compiler.allow_in_graph`)."""
    _OPAQUE.append(fun)
    if upstream.dynamo_is_loaded():
        torch.compiler.allow_in_graph(fun)
    return fun


def skipped_by_dynamo(fun: F) -> F:
    """Marks `fun` as one that compiled code calls as it is (`torch.compiler.disable`)."""
    name = f"{fun.__module__}.{fun.__qualname__}"
    _SKIPPED[name] = torch.compiler.disable(fun) if upstream.dynamo_is_loaded() else fun

    @wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _SKIPPED[name](*args, **kwargs)

    return cast(F, call)


def left_to_python(module: str) -> None:
    """Marks a module of which dynamo compiles no line, though it may what the module calls.

    Such a room runs a function again in other modes, nested too deeply for dynamo, which meets
    errors of its own there. It says so itself, in its first lines: `left_to_python(__name__)`.
    """
    _IN_PYTHON.append(module)
    if upstream.dynamo_is_loaded():
        upstream.skip_module(module)


@skipped_by_dynamo
def uncompiled(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`fun(*args, **kwargs)`, around which compiled code breaks its graph."""
    return fun(*args, **kwargs)


class Dynamo(Compiler):
    """What dynamo is told by the operators."""

    is_tracing = staticmethod(is_compiling)
    uncompiled = staticmethod(uncompiled)

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        def constant(*args: Any) -> Any:
            return fun(*args)

        return upstream.marked_constant(constant)

    def refuse(self, reason: str) -> None:
        if is_compiling():
            upstream.break_graph(reason)


class _WhenDynamoArrives(MetaPathFinder):
    """Finds dynamo as usual, and lets our functions be registered once it is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != upstream.DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for fun in _OPAQUE:
            torch.compiler.allow_in_graph(fun)
        for name, fun in _SKIPPED.items():
            _SKIPPED[name] = torch.compiler.disable(fun)
        for name in _IN_PYTHON:
            upstream.skip_module(name)


if not upstream.dynamo_is_loaded():
    sys.meta_path.insert(0, _WhenDynamoArrives())


# --- double backward of compiled code ----------------------------------------------------

LOST = "CompiledFunctionBackwardBackward"
_NO_DOUBLE_BACKWARD = (
    "a function compiled by torch.compile was differentiated twice from outside, and PyTorch has "
    "no compiled double backward (pytorch#91469): it loses that derivative in silence. Compile the "
    "derivative instead, as in torch.compile(lambda x: gt.hvp(f, (x,), (v,))), or use gt.compile "
    "without fullgraph, which then runs the function outside of the graph."
)


def refuse_lost(caller: str, outs: Sequence[Tensor]) -> None:
    """Raises if the graph of outs holds a compiled backward pass, which loses derivatives."""
    if upstream.DYNAMO in sys.modules and any(
        type(node).__name__ == LOST for node in nodes_of(outs)
    ):
        raise GradtoolsError(f"{caller}: {_NO_DOUBLE_BACKWARD}")


def not_exported(caller: str) -> GradtoolsError:
    """torch.export, which traces, takes no derivative of any kind (torch#125984)."""
    return GradtoolsError(
        f"{caller}: torch.export cannot trace a derivative that the program takes, PyTorch's own "
        "neither. Trace it first, as in torch.fx.experimental.proxy_tensor.make_fx(model)(x), "
        "whose graph of plain operations can be exported."
    )


def nodes_of(outs: Sequence[Tensor], stop: Iterable[Any] = ()) -> list[Any]:
    """The nodes of the autograd graph of outs, leaves' among them, up to those of `stop`."""
    found: list[Any] = []
    seen: set[Any] = set(stop)
    todo = [y.grad_fn or get_gradient_edge(y).node for y in outs if y.requires_grad]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        found.append(node)
        for parent, _ in node.next_functions:
            if parent is not None:
                todo.append(parent)
    return found


def leaves_of(outs: Sequence[Tensor]) -> Iterator[Tensor]:
    for node in nodes_of(outs):
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile(f)`; f is run as it is in forward mode, and where a double backward is asked.

    PyTorch's compiled code has neither, and drops tangents in silence.
    """
    run = torch.compile(f, **options)
    if isinstance(f, torch.nn.Module):
        return run

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return run(*args, **kwargs)
        if upstream.forward_level() >= 0:
            return f(*args, **kwargs)
        transformed = upstream.peek_interpreter_stack() is not None
        if options.get("fullgraph") or not torch.is_grad_enabled() or transformed:
            return run(*args, **kwargs)
        given = [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        before = Randomness.now(given)
        outs, treedef = trees.flatten(run(*args, **kwargs))
        tracked = [i for i, y in enumerate(outs) if isinstance(y, Tensor) and y.requires_grad]
        if not tracked:
            return trees.unflatten(treedef, outs)
        leaves = leaves_of([outs[i] for i in tracked])
        own = {id(x): x for x in [*given, *leaves] if x.requires_grad}

        def again() -> list[Tensor]:
            if before is not None and not before.stood(after):
                raise GradtoolsError(
                    f"compile: {_name(f)} draws random numbers, and outside of the compiled graph "
                    "it would draw others, so its double backward cannot be had by running it "
                    "again. Compile the derivative instead: " + _NO_DOUBLE_BACKWARD
                )
            result = trees.flatten(f(*args, **kwargs))[0]
            return [result[i] for i in tracked]

        after = Randomness.now(given)
        result = [outs[i] for i in tracked]
        point = _CompiledCall(_name(f), again, [get_gradient_edge(y) for y in result])
        for i, y in zip(tracked, _Twice.apply(point, result, *own.values()), strict=True):
            outs[i] = y
        return trees.unflatten(treedef, outs)

    return call


def _name(f: Any) -> str:
    return getattr(f, "__name__", None) or type(f).__name__


@dataclass
class _CompiledCall:
    """A call of a compiled function: how to run it again as it is, and the ends of its graph."""

    name: str
    again: Callable[[], list[Tensor]]
    ends: list[GradientEdge]


class _Twice(torch.autograd.Function):
    """A compiled function's outputs: the compiled backward pass, or a graph where one is asked."""

    @staticmethod
    def forward(ctx: Any, point: _CompiledCall, outs: list[Tensor], *inputs: Tensor) -> Any:
        ctx.point = point
        ctx.save_for_backward(*inputs)
        return tuple([y.detach() for y in outs])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        inputs, point, create = ctx.saved_tensors, ctx.point, torch.is_grad_enabled()
        keep = upstream.keeps_graph()
        if create:
            _tell(point.name)
        outs: Sequence[Any] = point.again() if create else point.ends
        if not keep:
            point.ends = []
        pairs = zip(outs, cts, strict=True)
        kept = [(y, ct) for y, ct in pairs if not isinstance(y, Tensor) or y.requires_grad]
        grads = torch.autograd.grad(
            [y for y, _ in kept],
            inputs,
            [ct for _, ct in kept],
            create_graph=create,
            retain_graph=create or keep,
            allow_unused=True,
        )
        return None, None, *grads


def _tell(name: str) -> None:
    warn_once(
        ("compile", name),
        f"compile: {name} is run again outside of the compiled graph, because its derivative is "
        "taken with a graph of its own and PyTorch has no compiled double backward "
        "(pytorch#91469). The numbers are right; compiling the derivative instead is faster.",
    )
