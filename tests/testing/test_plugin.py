"""Tests the pytest plugin by running pytest inside of pytest."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

import gradtools
from gradtools.testing import plugin, pytest_entry

pytest_plugins = ["pytester"]
BOTH = gradtools.available_backends() == ("torch", "jax")
needs_both = pytest.mark.skipif(not BOTH, reason="needs torch and jax")
# pytester unloads modules that are first imported inside of a run
for backend in gradtools.available_backends():
    importlib.import_module(f"gradtools.{backend}")
LOADED = ("-p", "gradtools.testing.plugin", "-p", "no:cacheprovider")


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    """Run a file of tests in this process, where the frameworks are already imported."""
    pytester.makepyfile(source)
    return pytester.runpytest_inprocess(*LOADED, *options)


USES_GT = """
    import numpy as np

    def test_a_square_has_the_slope_two_x(gt):
        x = gt.asarray(np.float32(3.0))
        assert float(gt.grad(lambda x: x ** 2)(x)) == 6

    class TestMethods:
        def test_of_a_class(self, gt):
            assert gt.__name__.startswith("gradtools.")
"""
USES_CROSS_CHECK = """
    import numpy as np, torch, jax.numpy as jnp

    X = np.array([0.0, 1.0, 2.0])

    def test_sin(cross_check):
        assert cross_check(torch=torch.sin, jax=jnp.sin, args=(X,), order=1)

    def test_a_kink(cross_check):
        cross_check(torch=torch.abs, jax=jnp.abs, args=(X,), order=1)

    def test_a_fault(cross_check):
        report = cross_check(
            torch=torch.sin, jax=lambda x: -jnp.sin(x), args=(X,), order=0, raises=False
        )
        assert report.cause == "sign"

    def test_that_fails(cross_check):
        cross_check(torch=torch.sin, jax=lambda x: 3 * jnp.sin(x), args=(X,), order=0)
"""


@needs_both
def test_a_test_that_takes_gt_runs_once_for_each_backend(pytester):
    found = run(pytester, USES_GT, "-v")
    found.assert_outcomes(passed=4)
    found.stdout.fnmatch_lines(["*slope_two_x[[]torch[]] PASSED*", "*slope_two_x[[]jax[]] PASSED*"])


@pytest.mark.slow_at("torch")
@pytest.mark.parametrize("backend", gradtools.available_backends())
def test_the_option_chooses_one_backend(pytester, backend):
    found = run(pytester, USES_GT, "-v", f"--gradtools-backend={backend}")
    found.assert_outcomes(passed=2)
    found.stdout.fnmatch_lines([f"*slope_two_x[[]{backend}[]] PASSED*"])


def test_without_a_backend_the_tests_are_skipped_and_say_why(pytester, monkeypatch):
    monkeypatch.setattr(gradtools, "available_backends", lambda: ())
    found = run(pytester, USES_GT + USES_CROSS_CHECK.split("import numpy")[0], "-rs")
    found.assert_outcomes(skipped=2)
    found.stdout.fnmatch_lines(["*no backend of gradtools is installed*"])


@needs_both
def test_the_fixture_cross_check_is_the_function(pytester):
    found = run(pytester, USES_CROSS_CHECK)
    found.assert_outcomes(passed=3, failed=1)
    found.stdout.fnmatch_lines(["*AgreementError: cross_check of sin and*1 disagree*"])


def test_a_run_that_does_not_use_it_imports_nothing_and_prints_nothing(pytester, monkeypatch):
    # plugins of other packages import heavy modules
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import sys

        def test_nothing_was_imported():
            heavy = {"torch", "jax", "jaxlib", "numpy", "flax", "array_api_compat"}
            assert not heavy & {name.split(".")[0] for name in sys.modules}
            ours = {name for name in sys.modules if name.startswith("gradtools")}
            assert ours == {"gradtools", "gradtools.errors", "gradtools.code_origin",
                            "gradtools.testing", "gradtools.testing.plugin"}
        """
    )
    found = pytester.runpytest_subprocess(*LOADED)
    found.assert_outcomes(passed=1)
    # the header of pytest lists the plugins
    after_the_header = found.stdout.str().split("collected 1 item")[1]
    assert "gradtools" not in after_the_header.replace("_gradtools", "")


def test_the_package_registers_it_under_its_modules_name():
    page = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert page["project"]["entry-points"]["pytest11"] == {"gradtools": pytest_entry.__name__}
    assert pytest_entry.pytest_plugins == [plugin.__name__]
