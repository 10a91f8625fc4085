"""Defines shared fixtures and options: backends, devices, precision and fast compilation.

XLA's code generator would take most of the time of the JAX tests, so programs that run are compiled
without optimization, which is five times as fast. Programs compiled ahead of time, as in
``jax.jit(f).lower(x).compile()``, use XLA's own defaults, because tests count their flops and bytes
and read their text. If GRADTOOLS_TEST_OPTIMIZED=1, all programs use XLA's defaults.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtools.testing import plugin
from gradtools.testing.plugin import BACKENDS, wanted_backends
from tests.support import state_of_process, tiers, torchvision_anywhere
from tests.support.devices import placed

GENERATORS = pytest.StashKey[list]()
CLOCK = pytest.StashKey[float]()
TIMES: dict[str, float] = {}  # The seconds that each test takes.
LEFT: dict[str, Any] = {}  # State of the process after the last test.


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add options, and register the package's plugin if no entry point has registered it."""
    if not pluginmanager.has_plugin(plugin.__name__):
        pluginmanager.register(plugin, plugin.__name__)
    parser.addoption("--times", help="write the seconds of each test to this file")
    parser.addoption("--gradtools-device", default="auto", help="auto, cpu, gpu, tpu or gpu:1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark test cases as slow or sweep, as the marks of their test functions specify."""
    tiers.mark_tiers(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a quick test that takes longer than GRADTOOLS_TEST_SECONDS.

    Tests that import many modules are exempt, because the first test that needs a compiler loads it
    for all later tests.
    """
    limit = os.environ.get("GRADTOOLS_TEST_SECONDS")
    before, modules = sum(os.times()[:4]), len(sys.modules)
    result = yield
    taken = sum(os.times()[:4]) - before
    if limit and tiers.is_quick(item) and len(sys.modules) < modules + 20:
        here = tiers.seconds_here(float(limit))
        if taken > here:
            pytest.fail(f"took {taken:.1f} s, limit {here:.1f} s: mark the test as slow", False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Record the CPU time of each phase, including subprocesses that have ended.

    Unlike elapsed time, CPU time does not depend on other load.
    """
    report = yield
    now = sum(os.times()[:4])
    report.processor_time = now - item.config.stash.get(CLOCK, now)
    item.config.stash[CLOCK] = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # The report of a crashed process has no attribute `processor_time`.
    seconds = getattr(report, "processor_time", 0.0)
    TIMES[report.nodeid] = TIMES.get(report.nodeid, 0.0) + seconds


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--times")
    if path and not hasattr(session.config, "workerinput"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(TIMES, indent=0), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    # Automatic garbage collection takes a twentieth of the test time and frees little memory. Tests
    # that need a collection call gc.collect.
    gc.set_threshold(20_000, 20, 20)
    wanted = wanted_backends(config)
    if not wanted:
        raise pytest.UsageError("no backend: install torch or jax, or change --gradtools-backend")
    if "jax" in wanted:
        from tests.support.xla_defaults import compile_quickly, keep_compiled

        keep_compiled(config.rootpath / ".pytest_cache" / "jax")
        import jax.experimental
        import jax.export  # older versions of JAX do not import this submodule

        compile_quickly()
        if not hasattr(jax, "enable_x64"):  # JAX 0.7
            jax.enable_x64 = jax.experimental.enable_x64

        jax.config.update("jax_enable_x64", True)
    if "torch" in wanted:
        import torch

        from tests.support.processes import keep_process_groups

        torchvision_anywhere.install()
        keep_process_groups()
        torch.set_num_threads(1)
    # arrays that test modules create at collection are also placed on the device
    inside = ExitStack()
    for backend in wanted:
        inside.enter_context(placed(backend, config.getoption("--gradtools-device")))
    config.add_cleanup(inside.close)


def pytest_report_header(config: pytest.Config) -> str:
    wanted = wanted_backends(config)
    absent = [b for b in BACKENDS if b not in wanted]
    return f"gradtools backends: {', '.join(wanted)}; left out: {', '.join(absent) or 'none'}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", wanted_backends(metafunc.config), scope="session")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the test folders of backends that are not selected; both/ requires both backends.

    Tests of integrations with other packages are collected only if selected by mark or by file.
    """
    if collection_path.suffix != ".py":
        return None
    name, folder = collection_path.name, collection_path.parent.name
    if folder == "integration" and config.option.markexpr != "integration":
        return None if any(Path(a.partition("::")[0]).name == name for a in config.args) else True
    absent = [backend for backend in BACKENDS if backend not in wanted_backends(config)]
    needed = {folder, name.removeprefix("test_").partition("_")[0]}
    return True if any(not needed.isdisjoint((backend, "both")) for backend in absent) else None


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_collected_again() -> None:
    """Freeze cached objects before each module; JAX's caches contain millions of objects.

    A test that counts or collects objects then processes only newer objects. Compiled code is
    dropped, because dynamo compiles a code object at most eight times. `gc.get_freeze_count` is
    replaced, because counting all frozen objects takes half a second.
    """
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = _SOMETHING_IS_FROZEN


# gc.get_freeze_count walks all frozen objects. The replacement keeps its docstring, which an
# example reads.
_SOMETHING_IS_FROZEN = functools.wraps(gc.get_freeze_count)(lambda: 1)


@pytest.fixture
def gt(backend_name: str):
    """Return the namespace of one backend; a test with this fixture runs once per backend."""
    return importlib.import_module(f"gradtools.{backend_name}")


@pytest.fixture
def default_precision() -> Iterator[None]:
    """Run the test with JAX's default precision, without x64."""
    if "jax" not in sys.modules:
        yield
        return
    import jax

    with jax.enable_x64(False):
        yield


@pytest.fixture
def quick_by_hand(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Compile ahead-of-time programs without optimization for tests that only read byte counts.

    XLA plans the same buffers without optimization; only the code is slower.
    """
    if "jax" in wanted_backends(request.config):
        from tests.support import xla_defaults

        monkeypatch.setattr(xla_defaults, "DEFAULTS", {})


def pytest_collection_finish(session: pytest.Session) -> None:
    """Store the state of every random generator that a test module created at import."""
    session.config.stash[GENERATORS] = [
        (value.bit_generator, value.bit_generator.state)
        for module in list(sys.modules.values())
        if (getattr(module, "__file__", None) or "").startswith(str(Path(__file__).parent))
        for value in vars(module).values()
        if isinstance(value, np.random.Generator)
    ]


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order(request: pytest.FixtureRequest) -> None:
    """Reset all random generators, so that a test draws the same numbers in any order of tests."""
    for generator, state in request.config.stash[GENERATORS]:
        generator.state = state
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(20261121)
        # before CUDA is initialized, manual_seed_all would queue a call and a stack trace per test
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(20261121)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Return ``--gradtools-device``, the device on which tests create arrays in both frameworks."""
    return str(request.config.getoption("--gradtools-device"))


@pytest.fixture(scope="session")
def torch_device(device: str) -> str:
    """Return PyTorch's name of the device, for tests that create arrays on explicit devices."""
    return "cpu" if device == "auto" else device.replace("gpu", "cuda")


@pytest.fixture(autouse=True)
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that changes a level, a mode or a default and does not restore it.

    If state changes between two tests, such as during garbage collection, the later test fails.
    """
    before = state_of_process.quick()
    changed = state_of_process.changes(LEFT, before)
    if not changed:
        yield
    LEFT.update(state_of_process.quick())
    left = changed or state_of_process.changes(before, LEFT)
    if left:
        when = "between two tests" if changed else request.node.nodeid
        pytest.fail(f"{when}: state was not restored: {'; '.join(left)}", pytrace=False)
