"""Implements `formula` for PyTorch: records a run of f as expressions, and differentiates f.

The function f runs once at copies of its arguments; its aten operations are recorded, and its side
effects are undone. Captured tensors that require grad are differentiated like arguments. An
operation outside of the vocabulary is decomposed by PyTorch, and the parts are recorded if all
parts are in the vocabulary. Otherwise, the operation becomes opaque: PyTorch computes and
differentiates the operation. Each torch.autograd.Function is an opaque operation.

An in-place operation gives the tensor a new value. GradtoolsError is raised if f reads a tensor
after a write to another view of its storage, or draws random numbers inside of an opaque operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gradtools.backend import Backend
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import call_if_kept
from gradtools.seeing.formulas import algebra, expressions
from gradtools.seeing.formulas.expressions import Expr, evaluate, kind_of, order
from gradtools.seeing.formulas.opaque import OpaqueFunction, by_name
from gradtools.seeing.formulas.operations import picked, stop
from gradtools.seeing.formulas.reverse_mode import Recorded
from gradtools.seeing.formulas.words import constant, fitted, has_opaque_part, made, translated
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.operands import SAME, AtenCall
from gradtools.seeing.torch.recording.autograd_functions import name_and_mark
from gradtools.seeing.torch.recording.observation import followed, recording_run
from gradtools.seeing.torch.recording.operations import NO_DATA
from gradtools.seeing.torch.recording.recorder import Operations, Recorder
from gradtools.seeing.torch.recording.values import Write, like, view_of
from gradtools.seeing.torch.undo import Undo, copied, undone
from gradtools.torch import _upstream as upstream
from gradtools.torch._upstream import pytree
from gradtools.torch.function_modes import PlainAttention, PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in
from gradtools.torch.operation_marks import plainly

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Values = Sequence[Expr | None]  # results of an operation; a result that is None is skipped


def formula_graph(program: LeafProgram) -> Recorded:
    """Records one forward run of a program as expressions, and undoes its side effects."""
    with recording_run(f"{program.caller}: a program", program.run, program.leaves) as undo:
        recorder = _FormulaRecorder(undo, program.backend)
        xs = [copied(x, k in program.wrt) for k, x in enumerate(program.leaves)]
        pairs = zip(xs, program.names, strict=True)
        inputs = [recorder.introduced(x, name) for x, name in pairs]

        def run() -> list[Expr]:
            with PlainAttention():  # computes attention as a softmax of products
                ys = program.run(xs)
            return [recorder.of(y) if isinstance(y, Tensor) else constant(y) for y in ys]

        with plainly():  # without recomputation
            outputs = recorder.run(run)
    read = set(order(outputs)).difference(inputs)
    held = {p: x for p, x in recorder.leaves.items() if p in read}
    wanted = tuple(p for p, x in held.items() if x.requires_grad and is_inexact(x))
    contents = {p: _numbers(x) for p, x in held.items()}
    captured = tuple(held[p] for p in wanted)
    dtypes = frozenset(recorder.dtypes)
    return Recorded(tuple(inputs), tuple(outputs), contents, wanted, captured, dtypes)


def differentiated(
    program: LeafProgram, recorded: Recorded, active: Sequence[int], point: Sequence[list[Any]]
) -> list[list[Any]]:
    """Returns outputs, gradients and, if `point` has directions, second derivatives of the program.

    active: The positions of the differentiated inputs and captured tensors.
    point: The inputs, the cotangents and, at order 2, the directions.
    """
    inputs, cotangents, directions = point
    wrt = [k for k in active if k < len(inputs)]
    undoing = undone(program.run, program.leaves)
    with undoing, followed(), torch.inference_mode(False), torch.enable_grad():
        xs = [copied(x, k in wrt) for k, x in enumerate(inputs)]
        moving = [*(xs[k] for k in wrt), *recorded.captured]
        with PlainKernels():  # fused kernels have no second derivative
            ys = program.run(xs)
            # Tensors are not converted, because torch.as_tensor moves them to the default device.
            outs = [y if isinstance(y, Tensor) else torch.as_tensor(y) for y in ys]
        inexact = [y for y in outs if is_inexact(y)]
        pairs = zip(cotangents, inexact, strict=True)
        given = [c.to(y.dtype).requires_grad_(bool(directions)) for c, y in pairs]
        gradients = _gradients(inexact, moving, given, again=bool(directions))
        second: list[Tensor] = []
        if directions:
            along = [u.to(g.dtype) for u, g in zip(directions, gradients, strict=True)]
            second = _gradients(gradients, [*moving, *given], along)
        return [[*map(_numbers, group)] for group in (outs, gradients, second)]


def _gradients(
    outs: Tensors, xs: Tensors, cotangents: Tensors, again: bool = False
) -> list[Tensor]:
    """Calls torch.autograd.grad; returns zeros for inputs on which no output depends."""
    pairs = [(y, c) for y, c in zip(outs, cotangents, strict=True) if y.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(xs)
    if pairs and xs:
        ys, cts = zip(*pairs, strict=True)
        grads = torch.autograd.grad(ys, xs, cts, create_graph=again, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads, strict=True)]


def _numbers(x: Tensor) -> np.ndarray:
    """Copies the contents of a tensor to a NumPy array."""
    with upstream.disable_current_modes():
        value = x.detach().resolve_conj().resolve_neg().cpu()
        value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        return value.clone().numpy()


def _like(x: Tensor) -> tuple[tuple[int, ...], str]:
    """Returns the shape of a tensor and the kind of its dtype."""
    shape, dtype = like(x)
    return shape, kind_of(dtype)


# --- the recorder


# Operations that draw random numbers; their results are constants.
_DRAWS = """
normal uniform bernoulli multinomial exponential poisson geometric log_normal cauchy random
normal_functional
""".split()


class _FormulaRecorder(Recorder[Expr]):
    """Records each tensor of a run as an expression."""

    caller, levels = "formula", ("rules", "functions", "operations")

    def __init__(self, undo: Undo, backend: Backend) -> None:
        super().__init__(undo)
        self.backend = backend
        self.leaves: dict[Expr, Tensor] = {}  # argument leaves and captured tensors
        self.dtypes: set[str] = set()  # dtypes of floating and complex results

    # Calls.

    def ruled(self, kind: Any, apply_: Any, args: Any, kwargs: Any) -> Any:
        """Records a torch.autograd.Function as an opaque operation."""
        if self.rules:
            return apply_(*args, **kwargs)
        name = name_and_mark(kind, args)[0]
        given = [self.of(x) for x in tensors_in([args, kwargs])]
        with self.within(name):
            out = apply_(*args, **kwargs)
        outs = [*tensors_in(out)]
        values: Values = [self.constant(y) for y in outs]
        if not all(x.is_constant for x in given):
            values = self.named(name, (kind.apply, args, kwargs), given, outs)
        self._note(outs, values)
        return out

    def called(self, fun: Any, args: Any, kwargs: Any) -> Any:
        """Records functions in `_FUNCTIONS` by name, and other functions as aten operations."""
        name, tensors, about = _FUNCTIONS.get(fun), [x for x in args if x is not None], {}
        if name == "einsum":
            about, tensors = {"subscripts": args[0]}, tensors[1:]
        plain = all(isinstance(x, Tensor) and is_inexact(x) for x in tensors)
        if not name or not plain or kwargs or upstream.peek_interpreter_stack() is not None:
            return fun(*args, **kwargs)
        xs = [self.of(x) for x in tensors]
        value = None if all(x.is_constant for x in xs) else made(name, xs, about)
        if value is None:
            return fun(*args)
        with self.silent():
            out = fun(*args)
        self._note([out], [value])
        return out

    def operated(self, call: AtenCall) -> Any:
        """Runs an aten operation and records an expression for each result."""
        if call.raw in SAME:
            out = call.run()
            self.hold(out, self.of(call.args[0]))
            return out
        if call.raw == "copy_" and view_of(call.args[0]) == view_of(call.args[1]):
            return call.run()  # y[0] += 1 ends with a copy of y[0] to itself
        given = [self.of(x) for x in tensors_in([call.args, call.kwargs])]
        operands = [self.of(x) if isinstance(x, Tensor) else constant(x) for x in call.operands()]
        writes = self.keep_written(call)
        out = call.run()
        made = [y for y in tensors_in(out) if not any(y is x for x in writes)]
        if any(x.layout is not torch.strided for x in tensors_in([call.args, call.kwargs, out])):
            raise GradtoolsError(
                "formula: f has sparse tensors; formulas support only dense tensors."
            )
        outs, values = made or writes, None
        key = call.raw.rstrip("_")
        name, attributes = call.said(out)
        seeded = torch.Tag.nondeterministic_seeded in call.func.tags
        if key in (*_DRAWS, *NO_DATA) or all(x.is_constant for x in given):
            values = [self.constant(y) for y in outs]
        elif key in READINGS:
            values = READINGS[key](self, call, attributes, *operands)
        else:
            likes = [*map(_like, outs)]
            values = translated(name, operands, attributes, likes, self.value_of)
        if values is None and seeded:  # each evaluation of an opaque operation draws new numbers
            raise GradtoolsError(
                f"formula: {name} draws random numbers while it computes. "
                "Pass the random numbers as an argument."
            )
        if values is None and (made or not writes):
            out, values = self._in_parts(call, given, writes if made else []) or (out, None)
        if values is None:
            if call.func.namespace == "gradtools" and self.rules:
                name = self.rules[-1][0]
            name = name.removeprefix("linalg_")
            values = self.named(name, (call.func, call.args, call.kwargs), given, outs)
        self._note(outs, values, not made)
        if made:  # side outputs, such as running statistics, become constants
            self._note(writes, [self.constant(x) for x in writes], written=True)
        return out

    def _in_parts(
        self, call: AtenCall, given: Sequence[Expr], left_out: Sequence[Tensor]
    ) -> tuple[Any, Values] | None:
        """Translates the decomposition of a call if all its operations are in the vocabulary.

        left_out: Tensors that the operation only updates; these arguments are replaced by None.
        """
        decomposed = private.decompositions().get(call.func, call.func.decompose)
        args = [None if any(x is y for y in left_out) else x for x in call.args]
        try:
            with Operations(self):
                out = decomposed(*args, **call.kwargs)
            results = [self.of(y) for y in tensors_in(out)]
        except Exception:  # decompositions may reject valid arguments
            return None
        opaque = out is NotImplemented or has_opaque_part(results, given)
        return None if opaque else (out, [])

    def named(
        self, name: str, call: tuple[Any, Any, Any], given: Sequence[Expr], outs: Tensors
    ) -> list[Expr]:
        """Returns the outputs of an opaque operation that calls a PyTorch function."""
        fun, args, kwargs = call
        kept = [call_if_kept(a) for a in args if isinstance(a, str)]  # keeps host kernels alive
        xs = [*tensors_in([args, kwargs])]

        def run(*tensors: Tensor) -> list[Tensor]:
            left = iter(tensors)
            swapped = lambda a: next(left).clone() if isinstance(a, Tensor) else a
            xs, named = pytree.tree_map(swapped, (tuple(args), dict(kwargs)))
            assert kept is not None
            with upstream.disable_current_modes(), torch.enable_grad():
                out = [*tensors_in(fun(*xs, **named))]
                return out or [*tensors_in(xs[0])]  # written in place

        kernel = OpaqueFunction(self.backend, run, xs, tuple(map(is_inexact, xs)))
        return by_name(name, given, map(_like, outs), kernel)

    # Values of tensors.

    def new(self, x: Any, name: str = "") -> Expr:
        """Creates a placeholder for a leaf or captured tensor."""
        value = expressions.placeholder(name, *_like(x))
        self.leaves[value] = x
        return value

    def met(self, x: Tensor) -> Expr:
        """Returns the expression of a captured tensor: a placeholder or a constant."""
        if self.table.memory(x) is not None:  # an unrecorded view of a known storage
            raise self._rewritten()
        self.undo.watch(x)
        if id(x) not in self.names and not x.requires_grad:
            return self.constant(x)
        return self.new(x, self.names.get(id(x), ""))

    def rewritten(self, x: Tensor, before: Expr, writes: Sequence[Write[Expr]]) -> Expr:
        """Raises an error, because formulas do not support reads after writes to an alias."""
        raise self._rewritten()

    def _rewritten(self) -> GradtoolsError:
        """Returns the error for reading a tensor after a write to another view of its storage."""
        place = self.origin().source
        return GradtoolsError(
            "formula: f writes to a tensor and then reads it through another view"
            f"{f' ({place})' if place else ''}. Build the whole tensor from its parts instead, "
            "with torch.cat, torch.stack or torch.where."
        )

    def constant(self, x: Tensor) -> Expr:
        """Returns a constant expression with the contents of a tensor."""
        with self.silent():
            return constant(_numbers(x))

    def value_of(self, x: Expr) -> np.ndarray:
        """Evaluates an expression at the leaves of this run."""
        leaves = [p for p in order([x]) if p.op == "placeholder"]
        with self.silent():
            return evaluate([x], {p: _numbers(self.leaves[p]) for p in leaves})[0]

    def _note(self, outs: Sequence[Tensor], values: Values, written: bool = False) -> None:
        """Assigns expressions to tensors; stops their derivatives if grad mode is disabled."""
        for y, value in zip(outs, values, strict=False):
            if value is None:
                continue
            value = fitted(value, _like(y))
            is_off = is_inexact(y) and not self.rules and not torch.is_grad_enabled()
            if is_inexact(y):
                self.dtypes.add(like(y)[1])
            if written and is_off and y.requires_grad:  # autograd does not record the write
                before = self.of(y)
                value = before + stop(value - before)
            if written:
                self.table.write(y, value)
            else:
                self.hold(y, stop(value) if is_off else value)


# Functions that are recorded by name: products, because their aten operations reshape operands;
# real and imaginary parts; and detach, because autograd also calls aten.detach for saved tensors.
_TENSOR: Any = Tensor
_TORCH: Any = torch  # the type stubs of torch lack some functions
_DETACHING = (torch.detach, Tensor.detach, _TENSOR.data.__get__, _TENSOR.detach_, _TORCH.detach_)
_FUNCTIONS: dict[Any, str] = dict.fromkeys(_DETACHING, "stop") | {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), "matmul"),
    **dict.fromkeys((torch.real, _TENSOR.real.__get__), "real"),
    **dict.fromkeys((torch.imag, _TENSOR.imag.__get__), "imag"),
    torch.nn.functional.linear: "linear",
    torch.einsum: "einsum",
}


# --- aten operations that need their own translation
# Functions in READINGS take the recorder, the call, its attributes and its operands.


def _nll(
    recorder: _FormulaRecorder, call: AtenCall, about: Any, x: Expr, target: Expr, *weight: Expr
) -> Values | None:
    """Translates nll_loss to -x[target] per row.

    Returns None if the call has weights or a label equals ignore_index.
    """
    if weight or (recorder.value_of(target) == call.given["ignore_index"]).any():
        return None
    losses = -picked(x, target)
    return [(losses, algebra.mean(losses), algebra.total(losses))[call.given["reduction"]], None]


READINGS: dict[str, Callable[..., Values | None]] = {
    # The random mask of dropout is a constant.
    "native_dropout": lambda recorder, call, about, x: [
        x * recorder.constant(call.outs[1] / (1 - call.given["p"])),
        None,
    ],
    "nll_loss_forward": _nll,
}
