"""Records a run in PyTorch: every operation's value, and the cotangents that reach it.

A dispatch mode sees the operations below autograd. Fused operations are decomposed as well, so that
a softmax meets the exponentials and sums of a port; these parts have values only. Afterwards hooks
on the autograd nodes of the recorded tensors give the cotangents in one backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from gradtools.code_origin import Source, lines_above, users_lines
from gradtools.testing.cross_checking.sides import cast, library, resolve
from gradtools.testing.diverging.recorded_steps import HALF, Arguments, Draw, Run, Step
from gradtools.torch._upstream import (
    Watching,
    decompositions,
    schema_of,
    tree_leaves,
    tree_map_only,
)

_ATEN = torch.ops.aten
_FUSED = {
    getattr(getattr(_ATEN, name), overload)
    for name, _, overload in (
        entry.partition(".")
        for entry in (
            "native_layer_norm.default native_batch_norm.default native_group_norm.default "
            "_native_batch_norm_legit.default _softmax.default _log_softmax.default addmm.default "
            "baddbmm.default gelu.default silu.default softplus.default mean.dim mean.default "
            "var.correction std.correction mse_loss.default huber_loss.default elu.default "
            "smooth_l1_loss.default nll_loss_forward.default logsumexp.default mish.default "
            "binary_cross_entropy_with_logits.default linalg_vector_norm.default glu.default "
            "_scaled_dot_product_flash_attention_for_cpu.default hardswish.default "
            "leaky_relu.default addcmul.default addcdiv.default lerp.Tensor "
            "_weight_norm_interface.default"
        ).split()
    )
    if hasattr(getattr(_ATEN, name, None), overload)
}
_ATTENTION = _ATEN._scaled_dot_product_attention_math.default


def torch_run(subject: Any, args: Arguments, dtype: str | None, draw: Draw) -> Run:
    """Runs a module (a copy), a triple of `make_functional` or a function.

    Args:
        subject: The program.
        args: Its arguments.
        dtype: The precision of a module's parameters and buffers; None leaves them as they are.
        draw: Returns cotangents for the outputs.
    """
    recorder = _Operations()
    given = [torch.tensor(x) if k in args.names else x for k, x in enumerate(args.leaves)]
    if library(subject) == "torch.nn":
        model = copy.deepcopy(subject)
        for x in (*model.parameters(), *model.buffers()):
            x.data = torch.as_tensor(cast(_array(x)[0], dtype)).to(x.device) if dtype else x.data
        model.requires_grad_(False)
        program: Any = model
        parameters: dict[Any, Any] = dict(model.named_parameters())
    else:
        model, parameters = None, {}
        program, tree, state = resolve(None, "torch", subject)
        if tree is not None:
            from gradtools.testing.diverging.parameters import walk

            apply, parameters = program, {".".join(map(str, p)): x for p, x in walk(tree)}
            program = lambda *args: apply(tree, state, *args)[0]
    floating = lambda x: isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
    tracked = [x.requires_grad_() for x in (*given, *parameters.values()) if floating(x)]
    steps = {k: recorder.add("input", given[k], [], leaf=name) for k, name in args.names.items()}
    named = {name: recorder.add("input", x, [], leaf=name) for name, x in parameters.items()}
    aliases = [x.view_as(x) if floating(x) else x for x in given]  # f may write in place
    with recorder, recorder.layers(model), torch.enable_grad():
        out = program(*args.rebuilt(aliases))
    outs = _tensors(out)
    ends = [recorder.step_of(y) for y in outs]
    seeds = [
        (y, torch.as_tensor(c, dtype=y.dtype))
        for y, c in zip(outs, draw(ends), strict=True)
        if c is not None and y.requires_grad
    ]
    if seeds:
        known = {id(x) for x in tracked}
        captured = [(s, x) for s, x in recorder.captured if x.requires_grad and id(x) not in known]
        own = [(s, given[k]) for k, s in steps.items()]
        own += [(s, parameters[name]) for name, s in named.items()]
        targets = [(s, x) for s, x in (*own, *captured) if x.requires_grad]
        handles = recorder.hooks()
        cotangents = torch.autograd.grad(
            [y for y, _ in seeds], [x for _, x in targets], [c for _, c in seeds], allow_unused=True
        )
        for handle in handles:
            handle.remove()
        for (step, _), g in zip(targets, cotangents, strict=True):
            step.cotangent = None if g is None else _array(g)[0]
    return Run(recorder.steps, ends, named)


class _Operations(Watching):
    """The dispatch mode. Tensors are recognized by identity, or by the memory they view."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.captured: list[tuple[Step, torch.Tensor]] = []
        self.nodes: dict[int, tuple[Any, list[tuple[int, Step]]]] = {}
        self.held: list[Any] = []  # no id or address may be used again
        self.by_id: dict[int, Step] = {}
        self.by_view: dict[Any, Step] = {}
        self.in_memory: dict[int, list[tuple[torch.Tensor, Step]]] = {}
        self.outer: tuple[Source, ...] | None = None  # the lines of the fused operation
        self.parts: list[Step] = []
        self.path: list[str] = []

    def add(self, op: str, x: torch.Tensor, parents: list[Step], **about: Any) -> Step:
        value, accuracy = _array(x)
        lines = () if about.get("leaf") else self.outer or users_lines(lines_above(1, torch_run))
        step = Step(op, lines, value, parents, len(self.steps), accuracy, **about)
        step.inside = self.outer is not None
        step.layer = "" if step.leaf or not self.path else self.path[-1]
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
            if before:
                step = self.add("view", x, [before[-1][1]])
            else:
                step = self.add("input", x, [], leaf="captured")
                self.captured.append((step, x))
        if self.outer is None and x.grad_fn is not None:
            node = x.grad_fn
            self.nodes.setdefault(id(node), (node, []))[1].append((x.output_nr, step))
        return step

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
        """Context that records the path of the running module of a copied model."""
        handles = []

        def leave(module: Any, args: Any, out: Any) -> None:
            self.path.pop()

        for name, module in model.named_modules() if model is not None else ():
            enter = lambda module, args, name=name: self.path.append(name)
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
        for handle in handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.outer is not None and func is _ATTENTION:
            with self:
                return func.decompose(*args, **kwargs)
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        parents = [self.step_of(x) for x in operands]
        fused = func in _FUSED and self.outer is None and func in decompositions()
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
        self.outer, self.parts = users_lines(lines_above(1, torch_run)), []
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
            kept = []
            for y, step in self.in_memory.get(_memory(x), ()) if torch.is_tensor(x) else ():
                if np.array_equal(
                    _array(y)[0], step.value, equal_nan=step.value.dtype.kind in "fc"
                ):
                    kept.append((y, step))
                else:
                    self.by_id.pop(id(y), None)
                    self.by_view.pop(_view(y), None)
            if torch.is_tensor(x):
                self.in_memory[_memory(x)] = kept


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree; dictionaries by sorted keys, as in JAX."""
    if isinstance(tree, Mapping):
        return [x for key in sorted(tree, key=str) for x in _tensors(tree[key])]
    if isinstance(tree, list | tuple):
        return [x for part in tree for x in _tensors(part)]
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


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
