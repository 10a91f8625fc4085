"""Pairs gradients with buffers by walking a target and its gradients in parallel.

The target is a pytree of parameters (PyTorch) or of a buffer's arrays (JAX). The gradients may
cover a part of the target: a dict may have fewer keys, and None leaves a subtree unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from gradtools.arguments.wording import in_words, type_in_words, with_article
from gradtools.errors import GradtoolsError
from gradtools.foreign_arrays import refuse_foreign


class TargetLeaf(NamedTuple):
    """A leaf of the target and its gradient."""

    path: str  # The leaf's path in the target.
    target: Any  # The parameter (PyTorch) or the buffer's array (JAX).
    grad: Any  # The gradient, or None to leave this leaf unchanged.


def paired(framework: str, trees: Any, caller: str, target: Any, grads: Any) -> list[TargetLeaf]:
    """Returns one entry for each leaf of target, in flattening order.

    trees: The framework's module of pytree functions.
    """
    leaves, treedef = trees.flatten(target)

    def pairs(numbered: Any, grads: Any, path: str) -> Iterator[tuple[int, Any]]:
        """Yields `(index, gradient)` for each leaf that has a gradient in grads.

        numbered: A part of the target, with leaves replaced by their indices.
        """

        def refuse(expected: str) -> NoReturn:
            came = with_article(type(grads).__name__)
            fix = f"Give the gradients the target's structure: {caller}(target, grads)."
            if hasattr(grads, "reset") and hasattr(grads, "mean"):  # a GradientAccumulator
                fix = "Pass its mean() or sum()."
            size = f" of {len(grads)}" if isinstance(grads, (list, tuple)) else ""
            raise GradtoolsError(
                f"{caller}: grads{path} is {came}{size}; expected {expected}. {fix}"
            )

        if grads is None:
            return
        if isinstance(numbered, int):
            refuse_foreign(framework, grads, f"grads{path} of {caller}")
            below = trees.flatten(grads)[0]
            if len(below) != 1 or below[0] is not grads:
                if not hasattr(leaves[numbered], "shape"):
                    raise GradtoolsError(
                        f"{caller}: target{path} is {type_in_words(leaves[numbered])}; expected a "
                        "pytree of arrays, or a module of this framework."
                        f"{_target_fix(framework, leaves[numbered])}"
                    )
                refuse("one array, as in the target")
            yield numbered, grads
        elif (entries := _entries(numbered)) is not None:
            given_entries = _entries(grads)
            if given_entries is None:
                refuse(f"a dict with keys among {_listed(entries)}")
            for key, grad in given_entries.items():
                if key not in entries:
                    raise GradtoolsError(
                        f"{caller}: grads{path}[{key!r}] is not in the target, whose keys "
                        f"at this path are {_listed(entries)}. Pass gradients under the target's "
                        "names; any of them may be left out."
                    )
                yield from pairs(entries[key], grad, f"{path}[{key!r}]")
        elif isinstance(numbered, (list, tuple)):
            if not isinstance(grads, (list, tuple)) or len(grads) != len(numbered):
                refuse(f"a sequence of {len(numbered)} (None leaves an entry unchanged)")
            fields = getattr(numbered, "_fields", None)
            for i, (below, grad) in enumerate(zip(numbered, grads, strict=True)):
                yield from pairs(below, grad, path + (f".{fields[i]}" if fields else f"[{i}]"))
        elif [id(x) for x in trees.flatten(numbered)[0]] == [id(numbered)]:
            # `unflatten` has rebuilt a registered dataclass with indices as leaves; other objects,
            # such as a string in a TensorDict, are constants of the structure
            if type(grads) is not type(numbered):
                refuse(f"a {type(numbered).__name__}, as in the target")
            for name, below in getattr(numbered, "__dict__", {}).items():
                yield from pairs(below, getattr(grads, name, None), f"{path}.{name}")
        else:
            below, below_def = trees.flatten(numbered)
            try:
                given = below_def.flatten_up_to(grads)
            except (ValueError, TypeError):
                refuse(f"the target's structure {in_words(below_def)}")
            for i, grad in zip(below, given, strict=True):
                yield from pairs(i, grad, path)

    grad_of = dict(pairs(trees.unflatten(treedef, list(range(len(leaves)))), grads, ""))
    return [
        TargetLeaf(path, leaf, grad_of.get(i))
        for i, (path, leaf) in enumerate(zip(trees.leaf_paths(target), leaves, strict=True))
    ]


def _entries(x: Any) -> dict[Any, Any] | None:
    """Returns the entries of a mapping, or None if x is not a mapping.

    A mapping has the methods `keys` and `__getitem__`. Iteration may have a different meaning: a
    TensorDict iterates over the examples of its batch.
    """
    kind = type(x)
    if isinstance(x, tuple) or not (hasattr(kind, "keys") and hasattr(kind, "__getitem__")):
        return None
    return {key: x[key] for key in x.keys()}  # noqa: SIM118


def _target_fix(framework: str, target: Any) -> str:
    """Returns the fix for a target that is a generator, or a module of the other framework."""
    if isinstance(target, Iterator):
        return " An iterator can be read only once: pass the module, or list(module.parameters())."
    packages = {kind.__module__.partition(".")[0] for kind in type(target).__mro__}
    for other, own in (("torch", {"torch"}), ("jax", {"flax", "equinox"})):
        if other != framework and packages & own:
            return f" Import gradtools.{other} in place of gradtools.{framework}."
    return ""


def _listed(keys: Any, most: int = 8) -> str:
    names = [repr(key) for key in keys]
    return ", ".join(names[:most] + ["..."] * (len(names) > most)) or "none"


def refuse(caller: str, came: str, expected: str, fix: str) -> NoReturn:
    """Raises a GradtoolsError that states the invalid input, the expected input and the fix."""
    raise GradtoolsError(f"{caller}: {came}; expected {expected}. {fix}")
