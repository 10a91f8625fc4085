"""Selects a device by name in both frameworks, and simulates devices of JAX.

A name is "cpu", "gpu" (or "cuda") or "tpu", optionally with an index as in "gpu:1"; "auto" keeps
each framework's default. In the context of `placed`, new arrays are created on the device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from gradtools.errors import GradtoolsError


@contextmanager
def placed(backend: str, device: str = "auto") -> Iterator[None]:
    """Context manager in which the framework creates new arrays on a device.

    Args:
        backend: "torch" or "jax".
        device: "auto", "cpu", "gpu" or "tpu", optionally with an index as in "gpu:1".

    Raises:
        GradtoolsError: If the device does not exist.
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
            f"here; it has {known}. Pass one of these, such as cpu or gpu:1, or auto."
        )
    if backend == "jax":
        with framework.default_device(chosen):
            yield
    else:  # torch.device as a mode adds overhead to every call
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
        except RuntimeError:  # JAX does not support this platform
            continue
    return present


def on_devices(program: str, count: int, optimized: bool = False) -> str:
    """Run a JAX program in a subprocess on `count` simulated CPU devices and return its output.

    optimized: Whether XLA optimizes the program, for tests that read the compiled text.
    """
    inherited = "" if optimized else os.environ.get("XLA_FLAGS", "")
    flags = f"{inherited} --xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stdout + done.stderr[-3000:]
