"""What every test shares: the backends, one device, double precision, a quick compiler.

Most of the time of JAX's tests was spent in XLA's code generator, which none of them is about.
So what is run is compiled without optimisation, five times as quickly. What is looked into, that
is, compiled by hand as in ``jax.jit(f).lower(x).compile()``, is compiled as a user would: flops,
bytes and the text of a program are counted with XLA's own defaults.
GRADTOOLS_TEST_OPTIMIZED=1 leaves everything as it is.
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
from gradtools.testing.cross_checking.devices import placed
from gradtools.testing.plugin import BACKENDS, wanted_backends
from tests.support import state_of_process, tiers, torchvision_anywhere

GENERATORS = pytest.StashKey[list]()
CLOCK = pytest.StashKey[float]()
TIMES: dict[str, float] = {}  # seconds, of each test
LEFT: dict[str, Any] = {}  # the state of the process after the last test


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Registers the package's own plugin, which an installed package registers by itself."""
    if not pluginmanager.has_plugin(plugin.__name__):
        pluginmanager.register(plugin, plugin.__name__)
    parser.addoption("--times", help="a file for the seconds that each test takes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that a mark on their function names are slow, or a sweep."""
    tiers.mark_tiers(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A quick test that takes too long fails, where GRADTOOLS_TEST_SECONDS says how long that is.

    What imports modules is let off: the first test that needs the compiler loads it for all.
    """
    limit = os.environ.get("GRADTOOLS_TEST_SECONDS")
    before, modules = sum(os.times()[:4]), len(sys.modules)
    result = yield
    taken = sum(os.times()[:4]) - before
    if limit and tiers.is_quick(item) and len(sys.modules) < modules + 20:
        here = tiers.seconds_here(float(limit))
        if taken > here:
            pytest.fail(f"a quick test took {taken:.1f} s of {here:.1f} s: mark it as slow", False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Each phase's processor time, also of the processes that it waited for.

    It is the same beside other work, which seconds by the clock are not.
    """
    report = yield
    now = sum(os.times()[:4])
    report.processor_time = now - item.config.stash.get(CLOCK, now)
    item.config.stash[CLOCK] = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds = getattr(report, "processor_time", 0.0)  # a process that died tells none
    TIMES[report.nodeid] = TIMES.get(report.nodeid, 0.0) + seconds


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--times")
    if path and not hasattr(session.config, "workerinput"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(TIMES, indent=0), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    # A twentieth of the time went into looking for garbage, of which there is little: what needs
    # a collection asks for one.
    gc.set_threshold(20_000, 20, 20)
    wanted = wanted_backends(config)
    if not wanted:
        raise pytest.UsageError("no backend to test: install torch or jax, or change the option")
    if "jax" in wanted:
        from tests.support.xla_defaults import compile_quickly, keep_compiled

        keep_compiled(config.rootpath / ".pytest_cache" / "jax")
        import jax.experimental
        import jax.export  # which older versions do not import by themselves

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
    inside = ExitStack()  # from here on: what modules make while they are collected is placed, too
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
    """What stands in torch/ or jax/ needs that backend, as do files named so; both/ needs both.

    Tests with other packages are collected where they are asked for: by mark, or by file.
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
    """What caches hold by now is out of the garbage collector's way: JAX's are millions of objects.

    A test that counts objects, or asks for a collection, sees what has been made since. Compiled
    code is let go of: dynamo compiles one piece of code, say a function of ours, but eight times.
    To count what is frozen, as `measure` does to learn whether anything is, takes half a second.
    """
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = _SOMETHING_IS_FROZEN


# The count walks all frozen objects. It keeps its docstring, which an example reads as data.
_SOMETHING_IS_FROZEN = functools.wraps(gc.get_freeze_count)(lambda: 1)


@pytest.fixture
def gt(backend_name: str):
    """The namespace of one backend; a test that takes it runs once for each."""
    return importlib.import_module(f"gradtools.{backend_name}")


@pytest.fixture
def default_precision() -> Iterator[None]:
    """JAX as a user finds it, without x64."""
    if "jax" not in sys.modules:
        yield
        return
    import jax

    with jax.enable_x64(False):
        yield


@pytest.fixture
def quick_by_hand(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is compiled by hand is compiled quickly, too, for who asks XLA for bytes alone.

    XLA plans the same bytes (seen in every digit that the examples print); the code is slower.
    """
    if "jax" in wanted_backends(request.config):
        from tests.support import xla_defaults

        monkeypatch.setattr(xla_defaults, "DEFAULTS", {})


def pytest_collection_finish(session: pytest.Session) -> None:
    """The generators that test modules and their tables keep, each in the state of its import."""
    session.config.stash[GENERATORS] = [
        (value.bit_generator, value.bit_generator.state)
        for module in list(sys.modules.values())
        if (getattr(module, "__file__", None) or "").startswith(str(Path(__file__).parent))
        for value in vars(module).values()
        if isinstance(value, np.random.Generator)
    ]


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers whichever tests ran before it in its process."""
    for generator, state in request.config.stash[GENERATORS]:
        generator.state = state
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(20261121)
        if torch.cuda.is_initialized():  # what waits for it would keep a stack of each test
            torch.cuda.manual_seed_all(20261121)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture(scope="session")
def device(gradtools_device: str) -> str:
    """Where every test makes its arrays, in both frameworks: ``--gradtools-device``."""
    return gradtools_device


@pytest.fixture(scope="session")
def torch_device(device: str) -> str:
    """PyTorch's name of it, for tests that place one array beside another elsewhere."""
    return "cpu" if device == "auto" else device.replace("gpu", "cuda")


@pytest.fixture(autouse=True)
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a level, a mode or a default behind fails itself, not those after it.

    What changes between two tests, as where garbage is collected, is told by the latter.
    """
    before = state_of_process.quick()
    changed = state_of_process.changes(LEFT, before)
    if not changed:
        yield
    LEFT.update(state_of_process.quick())
    left = changed or state_of_process.changes(before, LEFT)
    if left:
        when = "between two tests" if changed else request.node.nodeid
        pytest.fail(f"{when}: left behind: {'; '.join(left)}", pytrace=False)
