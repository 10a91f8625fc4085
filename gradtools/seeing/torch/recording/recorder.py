"""`Recorder` records a PyTorch run with function and dispatch modes, and assigns values to tensors.

`Recorder` intercepts calls at up to four levels; the method of each level executes the call::

    "rules"        ruled(class, apply, args, kwargs)   torch.autograd.Functions
    "parameters"   wrapped(class, make, args, kwargs)  constructions of Parameters and Buffers
    "functions"    called(function, args, kwargs)      PyTorch functions (TorchFunctionMode)
    "operations"   operated(call)                      aten operations (TorchDispatchMode)

`why_zero` uses the functions level to find stopped gradients and conversions to NumPy.
`gradient_graph` (`passes.py`) uses the operations level, which includes backward operations.
`formula` (`translating.py`) records some functions, such as products, at the functions level and
other calls at the operations level. This module implements the common parts: the values of tensors,
in-place writes, and the source line and modules of the running operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from gradtools.code_origin import PACKAGE, Source, innermost, lines_above
from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.nodes import Value
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.operands import AtenCall
from gradtools.seeing.torch.recording.values import TensorTable, Write, like
from gradtools.seeing.torch.thread_patches import functions_applied, parameters_made
from gradtools.seeing.torch.undo import Undo

Tensor = torch.Tensor
V = TypeVar("V")


@dataclass(frozen=True)
class Origin:
    """The origin of an operation: source line, modules, mark, and name of the rule."""

    source: Source | None = None
    scope: tuple[str, ...] = ()
    mark: str = ""
    rule: str = ""


class Recorder(Generic[V]):
    """Base class for recorders; V is the type of a value, such as an index or an expression.

    Args:
        undo: Copies of the state that the run may change.

    Attributes:
        caller: The name of the operator, for error messages.
        levels: The intercepted levels, outermost first.
        values: Maps each value index to the shape, dtype and name of the value.
        captured: Maps value indices to captured tensors, or to None for Python numbers.
        names: Maps the ids of captured tensors to their names.
        scope: The names of the running modules, outermost first, each relative to the parent
            module.
        rules: The names and marks of the running torch.autograd.Functions, outermost first.
        table: The table of known tensors and their values.
        quiet: Whether recording is paused.
    """

    caller = ""
    levels: tuple[str, ...] = ()

    def __init__(self, undo: Undo) -> None:
        self.values: dict[int, Value] = {}
        self.captured: dict[int, Any] = {}
        self.undo, self.names = undo, undo.names
        self.scope: tuple[str, ...] = ()
        self.rules: list[tuple[str, str]] = []
        self.table = TensorTable[V]()
        self.quiet = False

    # --- running

    def run(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Runs and records `fun(*args)`; the search for the user's line ends at this frame."""
        with ExitStack() as inside:
            inside.enter_context(self._modules_followed())
            for level in self.levels:
                inside.enter_context(_LEVELS[level](self))
            return fun(*args)

    @contextmanager
    def _modules_followed(self) -> Iterator[None]:
        """Context manager that updates `scope` when this thread calls a module."""
        thread = threading.get_ident()
        running: list[tuple[torch.nn.Module, tuple[str, ...]]] = []  # (module, previous scope)
        names: dict[int, dict[int, str]] = {}  # submodule names of each module, by id

        def enter(module: torch.nn.Module, args: Any) -> None:
            if threading.get_ident() != thread:
                return
            name = None
            if running:
                around = running[-1][0]
                if id(around) not in names:
                    names[id(around)] = {id(part): name for name, part in around.named_modules()}
                name = names[id(around)].get(id(module))
            running.append((module, self.scope))
            self.scope = (*self.scope, name or type(module).__name__)

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            if threading.get_ident() != thread or all(of is not module for of, _ in running):
                return
            left = None
            while left is not module:  # also remove inner modules that raised errors
                left, self.scope = running.pop()

        with ExitStack() as hooks:
            hooks.callback(setattr, self, "scope", self.scope)
            hooks.callback(register_module_forward_pre_hook(enter).remove)
            hooks.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield

    def origin(self) -> Origin:
        """Returns the source line and modules of the running operation.

        The source line is the innermost line of the user's code or, if the stack contains no such
        line, of an installed package.
        """
        return Origin(innermost(lines_above(1, Recorder.run), PACKAGE), self.scope)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Context manager that pauses recording."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    @contextmanager
    def within(self, name: str, mark: str = "") -> Iterator[None]:
        """Context manager that adds a torch.autograd.Function to `rules` while it runs."""
        self.rules.append((name, mark))
        try:
            yield
        finally:
            self.rules.pop()

    # --- values

    def new(self, x: Any, name: str = "") -> V:
        """Creates a value for a tensor or number; by default, the value is a new index."""
        number = len(self.values)
        shape, dtype = like(x) if isinstance(x, Tensor) else ((), type(x).__name__)
        self.values[number] = Value(shape, dtype, name)
        return cast(V, number)

    def introduced(self, x: Any, name: str) -> V:
        """Creates the value of an input and assigns the value to the tensor."""
        value = self.new(x, name)
        if isinstance(x, Tensor):
            self.hold(x, value)
        return value

    def hold(self, x: Tensor, value: V) -> None:
        """Assigns `value` to the tensor x."""
        self.table.hold(x, value)

    def of(self, x: Tensor) -> V:
        """Returns the current value of a tensor, after in-place writes to its aliases."""
        known = self.table.find(x)
        if known is None:
            value = self.met(x)
        elif writes := self.table.since(known):
            value = self.rewritten(x, known.value, writes)
        else:
            return known.value
        self.hold(x, value)
        return value

    def met(self, x: Tensor) -> V:
        """Returns a value for a tensor that existed before the run or was not recorded."""
        raise NotImplementedError

    def rewritten(self, x: Tensor, before: V, writes: Sequence[Write[V]]) -> V:
        """Returns the value of a tensor after in-place writes to aliases of its storage."""
        raise NotImplementedError

    def keep_written(self, call: AtenCall) -> list[Tensor]:
        """Returns the tensors that a call will modify; copies captured tensors for `Undo`."""
        written = [*call.written()]
        for x in written:
            self.of(x)  # registers x if it existed before the run
        return written

    def capture(self, x: Tensor, number: int) -> None:
        """Adds a captured tensor to `captured`, and copies the tensor for `Undo`."""
        self.captured[number] = x
        self.undo.watch(x)


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.quiet:
            return fun(*args, **(kwargs or {}))
        return self.recorder.called(fun, args, kwargs or {})


class Operations(private.Watching):
    """The dispatch mode of the "operations" level, which also records decompositions."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.quiet:
            return fun(*args, **(kwargs or {}))
        if not hasattr(fun, "overloadpacket"):
            raise GradtoolsError(f"{self.recorder.caller}: {fun} has no translation.")
        return self.recorder.operated(AtenCall(fun, args, kwargs or {}))


def _unless_quiet(recorder: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    def call(owner: Any, beneath: Any, args: Any, kwargs: Any) -> Any:
        return beneath(*args, **kwargs) if recorder.quiet else around(owner, beneath, args, kwargs)

    return call


_LEVELS: dict[str, Callable[[Any], Any]] = {
    "rules": lambda recorder: functions_applied(_unless_quiet(recorder, recorder.ruled)),
    "parameters": lambda recorder: parameters_made(_unless_quiet(recorder, recorder.wrapped)),
    "functions": _Functions,
    "operations": Operations,
}
