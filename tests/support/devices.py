"""Selection of a device by name in both frameworks.

A name is "cpu", "gpu" (or "cuda") or "tpu", optionally with an index as in "gpu:1"; "auto" keeps
each framework's default. Inside `placed` new arrays are created on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

from gradtools.errors import GradtoolsError


@contextmanager
def placed(backend: str, device: str = "auto") -> Iterator[None]:
    """A context in which the framework creates new arrays on this device.

    Args:
        backend: "torch" or "jax".
        device: "auto", "cpu", "gpu", "tpu", or one of several, such as "gpu:1".

    Raises:
        GradtoolsError: There is no such device here.
    """
    if device == "auto":
        yield
        return
    framework: Any = import_module(backend)
    kind, _, index = device.replace("cuda", "gpu").partition(":")
    present = _torch_devices(framework) if backend == "torch" else _jax_devices(framework)
    chosen = dict(enumerate(present.get(kind, []))).get(int(index) if index.isdigit() else 0)
    if chosen is None or not (index.isdigit() or device in (kind, "cuda")):
        known = ", ".join(f"{len(devices)} of {name}" for name, devices in present.items())
        raise GradtoolsError(
            f"device {device}: {'PyTorch' if backend == 'torch' else 'JAX'} has no such device "
            f"here; it has {known}. Name one of these, as cpu or gpu:1, or auto."
        )
    if backend == "jax":
        with framework.default_device(chosen):
            yield
    else:  # PyTorch's mode of a default device costs time at each call
        is_default = chosen.type == framework.get_default_device().type == "cpu"
        with nullcontext() if is_default else chosen:
            yield


def _torch_devices(torch: Any) -> dict[str, list[Any]]:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {"cpu": [torch.device("cpu")], **({"gpu": gpus} if gpus else {})}


def _jax_devices(jax: Any) -> dict[str, list[Any]]:
    present = {}
    for kind in ("cpu", "gpu", "tpu"):
        try:
            present[kind] = jax.local_devices(backend=kind)
        except RuntimeError:  # JAX has no such platform here
            continue
    return present
