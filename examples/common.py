"""Runs an example on the backends that the command line selects, and compares the results.

An example is one function ``show(gt, backend)``, where ``gt`` is ``gradtools.torch`` or
``gradtools.jax``. The function prints its results, asserts claims about them, and returns a dict of
the arrays on which both backends must agree.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import gradtools

Show = Callable[[Any, str], dict[str, Any]]


def main(show: Show, tolerance: float = 1e-12) -> None:
    """Runs `show` on the selected backends and compares the results."""
    results = {}
    for backend in _wanted():
        print(f"{backend}:")
        gt = importlib.import_module(f"gradtools.{backend}")
        with double_precision(backend):
            results[backend] = {name: flat(gt, tree) for name, tree in show(gt, backend).items()}
    if len(results) == 2 and all(results.values()):
        largest = max(difference(a, results["jax"][n]) for n, a in results["torch"].items())
        print("both:")
        claim(f"largest difference between the backends {largest:.1e}", largest <= tolerance)


def claim(text: str, holds: Any) -> None:
    """Prints a claim if it is true; otherwise exits with status 1."""
    if not holds:
        sys.exit(f"  FAILED: {text}")
    print(f"  {text}")


def flat(gt: Any, tree: Any) -> np.ndarray:
    """Concatenates all numbers of a tree of dictionaries, tuples, lists and arrays."""
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if isinstance(tree, (list, tuple)):
        return np.concatenate([flat(gt, branch) for branch in tree])
    return np.ravel(tree if isinstance(tree, float) else gt.to_numpy(tree))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Returns max |a - b| / max |b|, or inf if this number is not finite."""
    found = float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-300))
    return found if np.isfinite(found) else float("inf")


def counter(backend: str) -> tuple[Callable[[], None], Callable[[], int]]:
    """Returns a function that records an evaluation and a function that returns the count."""
    calls: list[None] = []
    note = lambda: calls.append(None)
    if backend == "torch":
        return note, lambda: len(calls)
    import jax

    def total() -> int:
        jax.effects_barrier()
        return len(calls)

    return lambda: jax.debug.callback(note), total


@contextmanager
def double_precision(backend: str) -> Iterator[None]:
    """Enables JAX's x64 mode in every thread, then restores the mode; does nothing in PyTorch."""
    if backend == "torch":
        yield
        return
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _wanted() -> list[str]:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--backend", choices=("torch", "jax", "both"), default="both")
    chosen = parser.parse_args().backend
    installed = gradtools.available_backends()
    if chosen != "both" and chosen not in installed:
        sys.exit(f"{chosen} is not installed: pip install 'gradtools[{chosen}]'")
    for absent in {"torch", "jax"} - set(installed) if chosen == "both" else ():
        print(f"left out: {absent} is not installed")
    return [b for b in installed if chosen in (b, "both")]
