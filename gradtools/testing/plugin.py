"""The pytest plugin: runs tests once for each backend, and compares the backends.

It is installed with the package. It provides the fixtures `gt`, `gradtools_device` and
`cross_check` and the options ``--gradtools-backend``, ``--gradtools-device`` and
``--gradtools-x64``. A run that uses none of them imports no framework and prints nothing.
``-p no:gradtools`` switches it off.

    def test_a_square_has_the_slope_two_x(gt):              # once for each installed backend
        x = gt.asarray(np.float32(3.0))
        assert float(gt.grad(lambda x: x ** 2)(x)) == 6

    @pytest.fixture(scope="module")
    def model(gt): ...                                       # once for each backend, too

    def test_my_port_is_right(cross_check):                  # as gradtools.testing.cross_check
        cross_check(torch=torch_loss, jax=jax_loss, args=(x, y))

The traceback of a failing test hides gradtools' own frames, so that it ends at the line of the
test; ``--full-trace`` shows them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

import gradtools

BACKENDS = ("torch", "jax")
_PROPERTY = "gradtools_cross_check"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    parser.getgroup("gradtools").addoption(
        "--gradtools-x64",
        action="store_true",
        help="64-bit numbers in JAX for the whole run, as PyTorch has them",
    )
    parser.getgroup("gradtools").addoption(
        "--gradtools-device",
        default="auto",
        help="where tests that take gt make their arrays: auto, cpu, gpu, tpu, or as gpu:1",
    )
    parser.getgroup("gradtools").addoption(
        "--gradtools-backend",
        choices=(*BACKENDS, "both"),
        default="both",
        help="run tests that take a backend with this one only",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Enables x64 in JAX if the option is given; ``--full-trace`` keeps all frames."""
    if config.getoption("fulltrace", False):
        os.environ["GRADTOOLS_FULL_TRACEBACK"] = "1"
    if config.getoption("--gradtools-x64") and "jax" in wanted_backends(config):
        import_module("jax").config.update("jax_enable_x64", True)


def wanted_backends(config: pytest.Config) -> list[str]:
    """The installed and selected backends, in the order torch, jax."""
    option = config.getoption("--gradtools-backend")
    return [b for b in BACKENDS if option in (b, "both") and b in gradtools.available_backends()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes tests that use `gt` by backend."""
    if "gradtools_backend" not in metafunc.fixturenames:
        return
    wanted: list[Any] = list(wanted_backends(metafunc.config))
    if not wanted:
        reason = "no backend of gradtools is installed or selected"
        wanted = [pytest.param("none", marks=pytest.mark.skip(reason=reason))]
    metafunc.parametrize("gradtools_backend", wanted, scope="session")


@pytest.fixture(scope="session")
def gradtools_device(request: pytest.FixtureRequest) -> str:
    """The value of ``--gradtools-device``, "auto" by default."""
    return str(request.config.getoption("--gradtools-device"))


@pytest.fixture(scope="session")
def gt(gradtools_backend: str, gradtools_device: str) -> Iterator[Any]:
    """The namespace `gradtools.torch` or `gradtools.jax`; the test runs once for each.

    It has session scope, so that fixtures of every scope may use it.
    """
    from gradtools.testing.cross_checking.devices import placed

    with placed(gradtools_backend, gradtools_device):
        yield import_module(f"gradtools.{gradtools_backend}")


@pytest.fixture
def cross_check(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`gradtools.testing.cross_check`, whose reports are summarized at the end of the run.

    A test that uses it is skipped unless both frameworks are installed and selected.
    """
    missing = [b for b in BACKENDS if b not in wanted_backends(request.config)]
    if missing:
        pytest.skip(
            f"cross_check needs both frameworks; not installed or not selected: {missing[0]}"
        )

    def checked(*, raises: bool = True, **options: Any) -> Any:
        from gradtools.testing.cross_checking.compare import cross_check as run

        report = run(raises=False, **options)
        request.node.user_properties.append((_PROPERTY, _record(report)))
        return report.require() if raises else report

    return checked


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> None:
    """Hides gradtools' own frames in the tracebacks of failures."""
    if call.excinfo is not None:
        from gradtools.boundary import hidden_frames  # a run without failures never needs it

        for _, hidden in hidden_frames(call.excinfo.value):
            for frame in hidden:
                frame.f_locals["__tracebackhide__"] = True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the summary of all cross-checks."""
    result = list(_records(terminalreporter.stats))
    if not result:
        return
    terminalreporter.section("gradtools cross-checks")
    for line in summary_lines(result):
        terminalreporter.line(line)


def summary_lines(recorded: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The summary's lines, from pairs of a test and the record of a report."""
    records = [record for _, record in recorded]
    arrays = sum(record["arrays"] for record in records)
    test, closest = max(recorded, key=lambda pair: pair[1]["error"])
    checks = f"{len(records)} check{'s' * (len(records) > 1)}"
    lines = [
        f"{checks}, {arrays} arrays compared; largest error of what agrees "
        f"{closest['error']:.2g} of the tolerance ({test})"
    ]
    for test, record in recorded:
        if record["cause"] is not None:
            lines.append(f"disagrees: {test}: {record['first']}: {record['cause']}")
    known = sorted({cause for record in records for cause in record["conventions"]})
    lines += [f"met a known {cause}" for cause in known]
    left_out = sum(record["left_out"] for record in records)
    if left_out:
        lines.append(f"left out: {left_out} quantities that a framework cannot compute")
    return lines


def _record(report: Any) -> dict[str, Any]:
    """A report's data for the summary, which pytest-xdist can serialize."""
    first = report.first
    return {
        "arrays": len(report),
        "error": max((c.error for c in report if c.status == "agrees"), default=0.0),
        "first": None if first is None else f"{first.quantity} of {first.path}",
        "cause": None if first is None else str(first.cause),
        "conventions": sorted({str(c.cause) for c in report.conventions}),
        "left_out": len(report.left_out),
    }


def _records(stats: dict[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for reports in stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, value in report.user_properties:
                    if name == _PROPERTY:
                        yield report.nodeid, value
