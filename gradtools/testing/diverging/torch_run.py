"""Records a run in PyTorch: every operation's value, and the cotangents that reach it.

A dispatch mode sees the operations below autograd. Fused operations are decomposed as well, so that
a softmax meets the exponentials and sums of a port; these parts have values only. Afterwards hooks
on the autograd nodes of the recorded tensors give the cotangents in one backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from gradtools.code_origin import Source, lines_above, users_lines
from gradtools.seeing.torch._upstream import Watching, decompositions, schema_of
from gradtools.testing.cross_checking.sides import Side, library
from gradtools.testing.diverging.runs import HALF, Draw, Place, Run, Step
from gradtools.torch._upstream import tree_leaves, tree_map_only

_ATEN = torch.ops.aten
_FUSED = (  # operations that JAX's programs spell out
    "native_layer_norm native_batch_norm native_group_norm _native_batch_norm_legit _softmax "
    "_log_softmax addmm baddbmm gelu silu softplus mean.dim mean var.correction std.correction "
    "mse_loss huber_loss elu smooth_l1_loss nll_loss_forward logsumexp mish glu hardswish "
    "binary_cross_entropy_with_logits linalg_vector_norm leaky_relu addcmul addcdiv lerp.Tensor "
    "_scaled_dot_product_flash_attention_for_cpu _weight_norm_interface"
).split()
_ATTENTION = _ATEN._scaled_dot_product_attention_math.default


def run_in_torch(side: Side, program: Any, leaves: Sequence[Any], names: Any, draw: Draw) -> Run:
    """Runs the program of a side at leaves.

    Args:
        side: The side, whose module's layers name the operations.
        program: A function of the leaves in PyTorch.
        leaves: NumPy arrays, all of them differentiated.
        names: Their names.
        draw: Returns cotangents for the outputs.
    """
    recorder = _Operations()
    given = [torch.clone(x).requires_grad_() for x in side.arrays(leaves)]
    own = [recorder.add("input", x, [], leaf=n) for x, n in zip(given, names, strict=True)]
    aliases = [x.view_as(x) for x in given]  # f may write in place
    model = side.subject if library(side.subject) == "torch.nn" else None
    with recorder, recorder.layers(model), torch.enable_grad():
        outs = side.named_arrays(program(*aliases))
    ends = {path: recorder.step_of(y) for path, y in outs.items()}
    recorder.mark_functions()
    drawn = draw(ends)
    seeds = [
        (outs[path], torch.as_tensor(c, dtype=outs[path].dtype, device=outs[path].device))
        for path, c in drawn.items()
        if c is not None and outs[path].requires_grad
    ]
    if seeds:
        handles = recorder.hooks()
        ys, cts = zip(*seeds, strict=True)
        cotangents = torch.autograd.grad(ys, given, cts, allow_unused=True)
        for handle in handles:
            handle.remove()
        for step, g in zip(own, cotangents, strict=True):
            step.cotangent = None if g is None else _array(g)[0]
    return Run(recorder.steps, own, ends)


class _Operations(Watching):
    """The dispatch mode. Tensors are recognized by identity, or by the memory they view."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.nodes: dict[int, tuple[Any, list[tuple[int, Step]]]] = {}
        self.held: list[Any] = []  # no id or address may be used again
        self.by_id: dict[int, Step] = {}
        self.by_view: dict[Any, Step] = {}
        self.in_memory: dict[int, list[tuple[torch.Tensor, Step]]] = {}
        self.outer: tuple[Source, ...] | None = None  # the lines of the fused operation
        self.parts: list[Step] = []
        self.path: list[str] = []
        overloads = (name if "." in name else f"{name}.default" for name in _FUSED)
        found = [(getattr(_ATEN, n.split(".")[0], None), n.split(".")[1]) for n in overloads]
        self.fused = {getattr(op, overload) for op, overload in found if hasattr(op, overload)}

    def add(self, op: str, x: torch.Tensor, parents: list[Step], leaf: str = "") -> Step:
        value, accuracy = _array(x)
        place = Place(leaf)
        if not leaf:
            lines = self.outer or users_lines(lines_above(1, run_in_torch))
            place = Place(op, lines, self.path[-1] if self.path else "")
        step = Step(place, value, parents, len(self.steps), accuracy, leaf=leaf)
        step.inside = self.outer is not None
        self.steps.append(step)
        self.held.append(x)
        self.by_id[id(x)] = step
        if op != "detach":
            self.by_view[_view(x)] = step
        self.in_memory.setdefault(_memory(x), []).append((x, step))
        return step

    def step_of(self, x: torch.Tensor) -> Step:
        step = self.by_id.get(id(x)) or self.by_view.get(_view(x))
        if step is None:
            before = self.in_memory.get(_memory(x))
            leaf = "" if before else "captured"
            step = self.add("view", x, [before[-1][1]] if before else [], leaf=leaf)
        if self.outer is None and (node := x.grad_fn) is not None:
            self.nodes.setdefault(id(node), (node, []))[1].append((x.output_nr, step))
        return step

    def mark_functions(self) -> None:
        """Marks values inside of autograd.Functions, through which no cotangent flows."""
        tracked = {id(step) for _, steps in self.nodes.values() for _, step in steps}
        for node, steps in self.nodes.values():
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                pending = [p for _, step in steps for p in step.parents]
                while pending:
                    step = pending.pop()
                    if not (step.leaf or step.inside or id(step) in tracked):
                        step.inside = True
                        pending += step.parents

    def hooks(self) -> list[Any]:
        """Hooks that store the cotangents of the recorded tensors."""

        def hook(grads: Any, steps: Any) -> None:
            for k, step in steps:
                g = grads[k] if k < len(grads) else None
                if g is not None and tuple(g.shape) == step.value.shape:
                    step.cotangent = _array(g)[0]

        every = self.nodes.values()
        return [node.register_prehook(partial(hook, steps=steps)) for node, steps in every]

    @contextmanager
    def layers(self, model: Any) -> Iterator[None]:
        """Context that records the path of the running module."""
        handles = []

        def leave(module: Any, args: Any, out: Any) -> None:
            self.path.pop()

        for name, module in model.named_modules() if model is not None else ():
            enter = lambda module, args, name=name: self.path.append(name)
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.outer is not None and func is _ATTENTION:
            with self:
                return func.decompose(*args, **kwargs)
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        parents = [self.step_of(x) for x in operands]
        fused = func in self.fused and self.outer is None and func in decompositions()
        if fused:
            parents += self._decomposed(func, args, kwargs)
        out = func(*args, **kwargs)
        schema = schema_of(func)
        if schema.is_mutable:
            self._forget_stale_views(out)
        name = schema.name.rpartition("::")[2]
        outs = out if isinstance(out, tuple | list) else [out]
        made = [self.add(name, x, list(parents)) for x in outs if isinstance(x, torch.Tensor)]
        for step in made[1:] if fused else ():  # statistics, through which no cotangent flows
            step.inside = True
        self.parts += made if self.outer is not None else []
        return out

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> list[Step]:
        """The last values of a fused operation's decomposition, run on copies."""

        def copied(x: torch.Tensor) -> torch.Tensor:
            same = x.clone()
            self.by_id[id(same)] = self.by_id.get(id(x)) or self.by_view[_view(x)]
            self.held.append(same)
            return same

        args, kwargs = tree_map_only(torch.Tensor, copied, (args, kwargs))
        self.outer, self.parts = users_lines(lines_above(1, run_in_torch)), []
        try:
            with self, torch.random.fork_rng(devices=[]):
                decompositions()[func](*args, **kwargs)
        finally:
            self.outer = None
        used = {id(p) for s in self.parts for p in s.parents}
        return [s for s in self.parts if id(s) not in used]

    def _forget_stale_views(self, out: Any) -> None:
        """Forgets tensors whose values an operation in place changed."""
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor):
                continue
            kept = []
            for y, step in self.in_memory.get(_memory(x), ()):
                is_float = step.value.dtype.kind in "fc"
                if np.array_equal(_array(y)[0], step.value, equal_nan=is_float):
                    kept.append((y, step))
                else:
                    self.by_id.pop(id(y), None)
                    self.by_view.pop(_view(y), None)
            self.in_memory[_memory(x)] = kept


def _array(x: torch.Tensor) -> tuple[np.ndarray, float]:
    """A copy in NumPy, and its accuracy if it was widened from 16 bits."""
    x = x.detach().resolve_conj().resolve_neg().cpu()
    x = x if x.layout is torch.strided else x.to_dense()
    half = x.dtype in (torch.bfloat16, torch.float16)
    return np.array((x.float() if half else x).numpy()), HALF if half else 0.0


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def _view(x: torch.Tensor) -> Any:
    if x.layout is not torch.strided:
        return id(x)
    place = x.storage_offset(), x.shape, x.stride(), x.dtype
    return _memory(x), *place, x.is_conj(), x.is_neg()
