"""Defines the pytest plugin, which runs tests for each backend and compares the backends.

The plugin is installed with the package. The plugin provides the fixtures `gt` and `cross_check`
and the options ``--gradtools-backend`` and ``--gradtools-checked``. In a test run without
these fixtures and options, the plugin imports no framework and prints nothing. ``-p no:gradtools``
disables the plugin.

    def test_a_square_has_the_slope_two_x(gt):              # once for each installed backend
        x = gt.asarray(np.float32(3.0))
        assert float(gt.grad(lambda x: x ** 2)(x)) == 6

    @pytest.fixture(scope="module")
    def model(gt): ...                                       # also once for each backend

    def test_my_port_is_right(cross_check):                  # gradtools.testing.cross_check
        cross_check(torch=torch_loss, jax=jax_loss, args=(x, y))
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any

import pytest

import gradtools

BACKENDS = ("torch", "jax")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the command-line options."""
    group = parser.getgroup("gradtools")
    group.addoption(
        "--gradtools-checked",
        action="store_true",
        help="compare every derivative that gradtools computes in a test with finite differences",
    )
    group.addoption(
        "--gradtools-backend",
        choices=(*BACKENDS, "both"),
        default="both",
        help="run tests that use the `gt` fixture with this backend only",
    )


def wanted_backends(config: pytest.Config) -> list[str]:
    """Returns the installed and selected backends, in the order torch, jax."""
    option = config.getoption("--gradtools-backend")
    return [b for b in BACKENDS if option in (b, "both") and b in gradtools.available_backends()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Runs each test in a `checked` context if ``--gradtools-checked`` is given."""
    if not item.config.getoption("--gradtools-checked"):
        return (yield)
    from gradtools.testing.checked_mode import checked

    with checked() as report:
        result = yield
    if report.compared or report.skipped:
        item.add_report_section("call", "gradtools", str(report))
    return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes the tests that use `gt` over the backends."""
    if "gradtools_backend" not in metafunc.fixturenames:
        return
    wanted: list[Any] = list(wanted_backends(metafunc.config))
    if not wanted:
        reason = "no backend of gradtools is installed or selected"
        wanted = [pytest.param("none", marks=pytest.mark.skip(reason=reason))]
    metafunc.parametrize("gradtools_backend", wanted, scope="session")


@pytest.fixture(scope="session")
def gt(gradtools_backend: str) -> Any:
    """Returns `gradtools.torch` or `gradtools.jax`; the test runs once for each backend.

    The fixture has session scope, so fixtures of every scope may use it.
    """
    return import_module(f"gradtools.{gradtools_backend}")


@pytest.fixture
def cross_check(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Returns `gradtools.testing.cross_check`.

    A test that uses this fixture is skipped unless both frameworks are installed and selected.
    """
    missing = [b for b in BACKENDS if b not in wanted_backends(request.config)]
    if missing:
        pytest.skip(
            f"cross_check needs both frameworks; not installed or not selected: {missing[0]}"
        )
    from gradtools.testing.cross_checking.compare import cross_check as run

    return run
