"""The precision of float32 matrix products: current settings, and a context of highest precision.

Accelerators multiply float32 matrices with fewer bits if settings allow: TF32 has 11 of the 24,
bfloat16 has 8. Correct derivatives in float32 would then differ, so the checks run at the highest
precision and restore the settings afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from gradtools.errors import GradtoolsError

PRECISIONS = ("highest", "as set")
_HIGHEST = {"float32_matmul_precision": "highest", "cudnn.allow_tf32": False}
_FULL = ("none", "ieee", "highest", "float32")


@contextmanager
def highest_precision(backends: Iterable[str]) -> Iterator[None]:
    """A context in which these frameworks compute float32 products in full precision.

    Args:
        backends: Of "torch" and "jax".

    Example:
        >>> from gradtools.testing.cross_checking.precision import highest_precision, lowered
        >>> name = gt.__name__.split(".")[1]
        >>> with highest_precision([name]):
        ...     lowered(name)
        {}
    """
    with ExitStack() as inside:
        for backend in backends:
            if backend == "jax" and lowered("jax"):
                import jax

                inside.enter_context(jax.default_matmul_precision("highest"))
            elif backend == "torch" and _torch_lowered():
                from gradtools.torch.modes import PRECISIONS

                before = {name: get() for name, (get, _) in PRECISIONS.items()}
                inside.callback(_put, before)
                _put({name: _HIGHEST[name] for name in _HIGHEST if before[name] is not None})
                _put(dict.fromkeys(_torch_lowered(), "ieee"))
        yield


@contextmanager
def at_precision(caller: str, precision: str, backends: Sequence[str]) -> Iterator[list[str]]:
    """A context of the highest precision or the current one; yields notes if these differ.

    Args:
        caller: The calling operator, for the error.
        precision: "highest" or "as set".
        backends: Of "torch" and "jax".

    Raises:
        GradtoolsError: The precision is neither.
    """
    if precision not in PRECISIONS:
        raise GradtoolsError(
            f"{caller}: precision is {precision!r}; expected 'highest' or 'as set'."
        )
    how = "compared at the highest precision; set is" if precision == "highest" else "set is"
    lower = {name: ", ".join(f"{k} {v}" for k, v in lowered(name).items()) for name in backends}
    notes = [f"{name}: float32's products: {how} {words}" for name, words in lower.items() if words]
    with highest_precision(backends if precision == "highest" else ()):
        yield notes


def lowered(backend: str) -> dict[str, str]:
    """The settings that allow float32 products to lose bits, with their values.

    In PyTorch these are oneDNN's and, with a GPU, CUDA's. In JAX it is
    `jax_default_matmul_precision`, whose default loses bits on every device except the CPU.
    """
    if backend == "jax":
        import jax

        name = "jax_default_matmul_precision"
        value = getattr(jax.config, name)
        is_cpu = lambda: all(d.platform == "cpu" for d in jax.numpy.zeros(()).devices())
        full = value in _FULL or (value is None and is_cpu())
        return {} if full else {name: str(value)}
    import torch

    gpu = torch.cuda.is_available()
    return {n: v for n, v in _torch_lowered().items() if gpu or n.startswith(("mkldnn", "float32"))}


def described_precision(backend: str) -> str:
    """The current precision in one line.

    Example:
        >>> from gradtools.testing.cross_checking.precision import (
        ...     described_precision, highest_precision)
        >>> name = gt.__name__.split(".")[1]
        >>> with highest_precision([name]):
        ...     described_precision(name)
        "float32's products: highest"
    """
    result = lowered(backend)
    words = ", ".join(f"{name} is {value}" for name, value in result.items())
    return f"float32's products: {words or 'highest'}"


def _torch_lowered() -> dict[str, str]:
    """PyTorch's settings that allow products to lose bits on some device, with their values."""
    from gradtools.torch.modes import PRECISIONS

    current = {name: get() for name, (get, _) in PRECISIONS.items()}
    newer = {name: v for name, v in current.items() if name.endswith(".fp32_precision")}
    if not newer:  # before PyTorch 2.9
        return {name: v for name, v in current.items() if v != _HIGHEST[name]}
    return {name: value for name, value in newer.items() if value not in _FULL}


def _put(wanted: dict[str, Any]) -> None:
    """Changes these settings of PyTorch, in the order in which the older write the newer ones."""
    from gradtools.torch.modes import PRECISIONS

    for name, (get, put) in PRECISIONS.items():
        if name in wanted and get() != wanted[name]:
            put(wanted[name])
