"""Lists the tensors of a PyTorch model, and the tensors that its optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.diagnostics.training import (
    FROZEN,
    PARAMETER,
    UNREGISTERED,
    HeldArray,
    Optimised,
)
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.trees import flatten

Tensor = torch.Tensor
_DEPTH = 4  # maximum depth of nested containers


def lifted(caller: str, f: Any, args: Any, kwargs: Any, arrays: Any) -> None:
    """Returns None, because PyTorch recordings show which captured tensors f reads."""


def model_of(f: Any) -> nn.Module | None:
    """Returns f if f is a torch.nn.Module, otherwise None."""
    return f if isinstance(f, nn.Module) else None


def are_parameters(f: Any, x: Any) -> bool:
    """Returns whether a leaf of the argument x is a tensor that requires grad."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(x)[0])


def held(caller: str, model: Any) -> list[HeldArray]:
    """Lists each parameter or trainable tensor of a model, or of nested models and tensors."""
    result = list(_of(model, ""))
    if not result:
        raise GradtoolsError(
            f"{caller}: model is {with_article(type(model).__name__)} without parameters; expected "
            "a torch.nn.Module, or a tuple or dict of modules and tensors."
        )
    first: dict[int, HeldArray] = {}
    for one in sorted(result, key=lambda one: one.role not in (PARAMETER, FROZEN)):
        first.setdefault(id(one.array), one)
    return list(first.values())


def _of(model: Any, name: str) -> Iterator[HeldArray]:
    if isinstance(model, nn.Module):
        before = f"{name}." if name else ""
        for own, p in model.named_parameters():
            yield HeldArray(before + own, p, PARAMETER if p.requires_grad else FROZEN)
        listed = {id(part) for part in (*model.modules(), *model.parameters())}
        for own, b in model.named_buffers():
            if isinstance(b, nn.Parameter) or (b.requires_grad and not _is_computed(b, listed)):
                yield HeldArray(before + own, b, UNREGISTERED)
        for path, part in model.named_modules():
            for own, value in dict(vars(part)).items():
                if own not in upstream.SLOTS:
                    here = f"{before}{path}.{own}" if path else before + own
                    yield from _hidden(value, here, listed, _DEPTH)
    elif isinstance(model, Tensor) and is_inexact(model):
        yield HeldArray(name or "tensor", model, PARAMETER if model.requires_grad else FROZEN)
    elif isinstance(model, Mapping):
        for key, part in model.items():
            yield from _of(part, f"{name}.{key}" if name else str(key))
    elif isinstance(model, Sequence) and not isinstance(model, str):
        for i, part in enumerate(model):
            yield from _of(part, f"{name}[{i}]")


def _hidden(value: Any, name: str, listed: set[int], depth: int) -> Iterator[HeldArray]:
    """Yields trainable tensors in a module attribute that `parameters()` does not list."""
    if isinstance(value, Tensor):
        if value.requires_grad and not _is_computed(value, listed):
            yield HeldArray(name, value, UNREGISTERED)
    elif isinstance(value, nn.Module):
        if id(value) not in listed and depth < _DEPTH:
            listed.add(id(value))
            for own, p in value.named_parameters(name):
                yield HeldArray(own, p, UNREGISTERED)
    elif depth and type(value) in (list, tuple, dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            yield from _hidden(part, f"{name}[{key!r}]", listed, depth - 1)


def _is_computed(x: Tensor, listed: set[int]) -> bool:
    """Returns whether x was computed from a parameter, such as a weight under weight_norm."""
    return not x.is_leaf and any(id(leaf) in listed for leaf in leaves_of([x]))


def optimised(caller: str, optimizer: Any, model: Any, held: Sequence[HeldArray]) -> Optimised:
    several = list(optimizer) if type(optimizer) in (list, tuple) else [optimizer]
    groups = []
    for one in several:
        if not hasattr(one, "param_groups"):
            raise GradtoolsError(
                f"{caller}: optimizer is {with_article(type(one).__name__)}; expected a "
                "torch.optim.Optimizer, or a list of optimizers."
            )
        groups += one.param_groups
    stepped = [(i, k, p) for i, group in enumerate(groups) for k, p in enumerate(group["params"])]
    ids, own = {id(p) for _, _, p in stepped}, {id(one.array) for one in held}
    strange = [(i, k) for i, k, p in stepped if id(p) not in own]
    names = [f"optimizer.param_groups[{i}]['params'][{k}]" for i, k in strange]
    at_rest = {id(p) for i, _, p in stepped if _is_at_rest(groups[i])}

    def fault(one: HeldArray) -> Finding | None:
        if id(one.array) not in ids:
            return Finding(one.name, "not_optimized", "optimizer")
        if id(one.array) not in at_rest:
            return None
        return Finding(one.name, "not_optimized", "lr", detail="its learning rate is 0")

    return Optimised(lambda one: id(one.array) in ids, fault, names)


def _is_at_rest(group: Mapping[str, Any]) -> bool:
    """Returns whether the current and the initial learning rate of a group are zero."""
    return "lr" in group and not bool(group["lr"]) and not bool(group.get("initial_lr", 0.0))
