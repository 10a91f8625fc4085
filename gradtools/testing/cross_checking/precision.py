"""A context in which float32 matrix products keep all bits.

Accelerators multiply float32 matrices with fewer bits if settings allow: TF32 has 11 of the 24,
bfloat16 has 8. Correct derivatives in float32 would then differ, so the checks run at the highest
precision and restore the settings afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_HIGHEST = {"float32_matmul_precision": "highest", "cudnn.allow_tf32": False}
_FULL = ("none", "ieee", "highest", "float32")


@contextmanager
def highest_precision(backends: Iterable[str]) -> Iterator[None]:
    """A context in which these frameworks compute float32 products in full precision.

    Args:
        backends: Of "torch" and "jax".
    """
    with ExitStack() as inside:
        for backend in backends:
            if backend == "jax":
                import jax

                name = "jax_default_matmul_precision"
                value = getattr(jax.config, name)
                if value not in (*_FULL, None) or (not value and jax.default_backend() != "cpu"):
                    inside.enter_context(jax.default_matmul_precision("highest"))
                continue
            from gradtools.torch.modes import PRECISIONS

            before = {name: get() for name, (get, _) in PRECISIONS.items()}
            newer = {n: v for n, v in before.items() if n.endswith(".fp32_precision")}
            if any(value not in _FULL for value in newer.values()):
                inside.callback(_put, before)
                _put({name: x for name, x in _HIGHEST.items() if before[name] is not None})
                _put({name: "ieee" for name, value in newer.items() if value not in _FULL})
            elif not newer and any(before[n] != x for n, x in _HIGHEST.items()):  # PyTorch 2.8
                inside.callback(_put, before)
                _put(_HIGHEST)
        yield


def _put(wanted: dict[str, Any]) -> None:
    """Changes these settings of PyTorch, in the order in which the older write the newer ones."""
    from gradtools.torch.modes import PRECISIONS

    for name, (get, put) in PRECISIONS.items():
        if name in wanted and get() != wanted[name]:
            put(wanted[name])
