"""Selection of a device by name in both frameworks, and a description of the available ones.

A name is "cpu", "gpu" (or "cuda") or "tpu", optionally with an index as in "gpu:1"; "auto" keeps
each framework's default. Inside `placed` new arrays are created on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from gradtools.errors import GradtoolsError

KINDS = ("cpu", "gpu", "tpu")


@contextmanager
def placed(backend: str, device: str = "auto") -> Iterator[None]:
    """A context in which the framework creates new arrays on this device.

    Args:
        backend: "torch" or "jax".
        device: "auto", "cpu", "gpu", "tpu", or one of several, such as "gpu:1".

    Raises:
        GradtoolsError: There is no such device here.

    Example:
        >>> from gradtools.testing.cross_checking.devices import placed
        >>> with placed(gt.__name__.split(".")[1], "cpu"):
        ...     x = gt.asarray(1.0)
    """
    if device == "auto":
        yield
        return
    kind, _, index = device.partition(":")
    kind = "gpu" if kind == "cuda" else kind
    if kind not in KINDS or not (index or "0").isdigit():
        raise GradtoolsError(
            f"device {device!r}: expected auto, {', '.join(KINDS)}, or one of several, as gpu:1."
        )
    number = int(index or 0)
    if backend == "torch":
        import torch

        counts = {"cpu": 1, "gpu": torch.cuda.device_count(), "tpu": 0}
    else:
        import jax

        counts = {name: len(_jax_devices(name)) for name in KINDS}
    if number >= counts[kind]:
        framework = "PyTorch" if backend == "torch" else "JAX"
        present = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
        raise GradtoolsError(
            f"device {kind}:{number}: {framework} has no such device here; it has {present}. Name "
            "one of these, or auto."
        )
    if backend == "jax":
        inside: AbstractContextManager[Any] = jax.default_device(_jax_devices(kind)[number])
    elif kind == "cpu" and torch.get_default_device().type == "cpu":
        inside = nullcontext()  # avoids the overhead of the default-device mode
    else:
        inside = torch.device("cuda" if kind == "gpu" else "cpu", number)
    with inside:
        yield


def described(backend: str) -> str:
    """A framework's version and default device."""
    if backend == "torch":
        import torch

        return f"{torch.__version__}, run on the {torch.get_default_device()}"
    import jax

    return f"{jax.__version__}, run on the {jax.default_backend()}"


def _jax_devices(kind: str) -> list[Any]:
    import jax

    try:
        return list(jax.local_devices(backend=kind))
    except RuntimeError:  # JAX has no such platform here
        return []
