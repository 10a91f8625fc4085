"""Simulates a PyTorch device other than the CPU, and runs every operator on it.

`native/other_device.cpp` implements the device. The device becomes the `torch.accelerator` of its
process, so the sweep runs as a program in a separate process:

    python -m tests.support.other_device        # prints a report of each use as JSON

The report of each use contains the error, the number of host synchronizations, the device of the
result, whether the result equals the result on the CPU, whether the random state of the device
changed, and how many kernels did not run on the current stream.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradtools.torch as gt
import gradtools.torch.nn as edits
from tests.support.every_operator import POINT, USES, Use, World, healthy, leaves

HERE = Path(__file__).parent
NAME = "other"


def start() -> None:
    """Build the device once and register it under its name."""
    spec = importlib.util.spec_from_file_location(
        "building", HERE.parents[1] / "examples" / "building.py"
    )
    assert spec is not None
    assert spec.loader is not None
    building = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(building)
    building.torch_extension("other_device", HERE / "native")
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.ops.other_device.start()
    torch.utils.generate_methods_for_privateuse1_backend()


def _module() -> types.ModuleType:
    """Return `torch.other`, the counterpart of `torch.cuda`."""
    module = types.ModuleType(f"torch.{NAME}")
    random, set_random = torch.ops.other_device.random, torch.ops.other_device.set_random
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: torch.ops.other_device.seed(seed),
        "get_rng_state": lambda device=NAME: random(),
        "set_rng_state": lambda state, device=NAME: set_random(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    vars(module).update(functions)
    return module


# --- the sweep ---------------------------------------------------------------------------------


SEED = 3


def found(use: Use) -> dict[str, Any]:
    """Run a `Use` on the device several times and return a report of its behavior."""
    torch.manual_seed(SEED)
    expected = leaves(gt, use.run(World(gt, healthy(gt), gt.asarray(POINT))))
    x = gt.asarray(POINT).to(NAME)
    torch.manual_seed(SEED)
    stood = torch.ops.other_device.random()
    try:
        f = use.make(World(gt, healthy(gt), x))
        result, first = _waited(f, x)
        drew = not torch.equal(stood, torch.ops.other_device.random())
        _, again = _waited(f, x)
        strays = _strays(f, x)
    except Exception as error:
        where = traceback.format_exc().partition("Exception raised from")[0]
        return {"error": f"{type(error).__name__}: {error}"[:400], "where": where[-3000:]}
    return {
        "error": "",
        "first": first,
        "again": again,
        "devices": sorted({leaf.device.type for leaf in _tensors(result)}),
        "agrees": _agree(leaves(gt, result), expected),
        "drew": drew,
        "strays": strays,
    }


def _waited(f: Callable[[Any], Any], x: torch.Tensor) -> tuple[Any, int]:
    """Return the result of f and the number of times that the host waited for the device."""
    before = torch.ops.other_device.waits()
    result = f(x)
    return result, torch.ops.other_device.waits() - before


def _strays(f: Callable[[Any], Any], x: torch.Tensor) -> int:
    """Count the kernels of f that do not run on the stream that is current during the call."""
    device = torch.ops.other_device
    before = device.strays()
    device.enter_stream(1)
    device.expect_stream(1)
    try:
        f(x)
    finally:
        device.expect_stream(-1)
        device.enter_stream(0)
    return device.strays() - before


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if torch.is_tensor(leaf)]


def _agree(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    """Return whether two results agree up to 1e-12; the device uses the kernels of the CPU."""
    same = lambda x, y: bool((x == y).all() if x.dtype.kind == "U" else np.allclose(x, y, 1e-12))
    return len(a) == len(b) and all(map(same, a, b))


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.rand_like(x)  # `dropout` does not support the device's generator


def _summed(f: Callable[[Any], Any]) -> Callable[[World], Any]:
    return lambda w: gt.grad(lambda x: f(x).sum())


def _in_a_module(w: World) -> Any:
    """Differentiate a module with batch norm and RReLU, which draws random slopes."""
    net = torch.nn.Sequential(
        torch.nn.Linear(1, 3, dtype=torch.float64), torch.nn.BatchNorm1d(3, dtype=torch.float64),
        torch.nn.RReLU(), torch.nn.Linear(3, 2, dtype=torch.float64),
    ).to(w.x.device)  # fmt: skip
    apply, params, state = gt.make_functional(net)
    loss = lambda params, x: apply(params, state, x[:, None], key=gt.random_key(5))[0].sin().sum()
    gradient = gt.grad(loss)
    return lambda x: list(gradient(params, x).values())


def _hooked(w: World) -> Any:
    """Differentiate a module with a gradient edit; backward passes run in the device's thread."""
    net = torch.nn.Sequential(edits.GradientReversal(), torch.nn.Tanh())
    return gt.grad(lambda x: net(x).sum())


def _in_a_thread(run: Callable[[], Any]) -> Any:
    """Return the result of `run` in another thread, which has its own current stream."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _sine_of_jax(x: torch.Tensor) -> torch.Tensor:
    import jax

    from gradtools import bridge

    jax.config.update("jax_enable_x64", True)
    return bridge.to_torch(jax.numpy.sin)(x)


MORE = (
    Use("noise in chunked", _summed(gt.chunked(_dropped, 2))),
    Use("noise in checkpoint", _summed(gt.checkpoint(_dropped))),
    Use("noise in frozen", _summed(gt.frozen(_dropped))),
    Use("a module with a key", _in_a_module),
    Use("chunked: one row per chunk", _summed(gt.chunked(lambda x: torch.sin(x), 1))),
    Use("a module with an edit", _hooked),
)

FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {  # faults that the sweep must report
    "an array on the CPU": lambda x: x + torch.ones(4, dtype=x.dtype),
    "a number read by the host": lambda x: x * x.detach().sum().item(),
    "NumPy's array": lambda x: x * float(x.detach().numpy()[0]),
    "a generator on the CPU": lambda x: x.clone().normal_(generator=torch.Generator()),
    "a result on the CPU": lambda x: x.cpu(),
    "a random state that changes": lambda x: x + 0 * torch.rand_like(x),
    "a different result": lambda x: x + (x.device.type == "cpu"),
    "an ignored stream": lambda x: _in_a_thread(lambda: torch.sin(x)),
    "a device that JAX does not see": lambda x: _sine_of_jax(x),
}


def main() -> None:
    torch.set_num_threads(1)
    start()
    uses = [*MORE, *(use for use in USES if "torch" in use.backends)]
    faults = [Use(name, lambda w, fault=fault: fault) for name, fault in FAULTS.items()]
    print(json.dumps({use.name: found(use) for use in [*uses, *faults]}))


if __name__ == "__main__":
    sys.exit(main())
