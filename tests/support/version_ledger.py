"""Defines a pytest plugin of `tests.support.versions` for known failures and stored results.

`version_ledger.toml` lists tests that a version cannot pass, with reasons. These tests are expected
to fail. The run fails if a listed test passes or if an entry matches no test.

``--version-results FILE`` appends each test's outcome to a file. ``--again`` skips the tests that
passed or failed as expected according to that file.
"""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tests.support import tiers

LEDGER = Path(__file__).with_suffix(".toml")
DONE = ("passed", "skipped", "ledger")


def applies(entry: dict[str, Any]) -> bool:
    """Return whether an entry of the ledger applies to the installed versions."""
    for package in ("torch", "jax", "flax"):
        if package in entry:
            try:
                here = version(package)
            except PackageNotFoundError:
                return False
            if not SpecifierSet(entry[package]).contains(here, prereleases=True):
                return False
    return True


def entries() -> list[dict[str, Any]]:
    """Return the entries of the ledger: tests or cases, framework versions and a reason."""
    return tomllib.loads(LEDGER.read_text(encoding="utf-8"))["limit"]


def outcomes(path: Path) -> dict[str, str]:
    """Return the last outcome of each test in a results file: passed, skipped, ledger or failed."""
    if not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


class Results:
    """Append each test's outcome to a file, so that an interrupted run can be resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reasons = {entry["reason"] for entry in entries()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        excused = getattr(report, "wasxfail", "") in self.reasons
        outcome = "ledger" if excused and report.skipped else report.outcome
        if report.when == "call" or outcome != "passed":
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([report.nodeid, outcome]) + "\n")


def _matches(item: pytest.Item, test: str, entry: dict[str, Any]) -> bool:
    if tiers.function_of(item.nodeid) != test:
        return False
    case = item.nodeid.partition("[")[2].removesuffix("]")
    return "cases" not in entry or tiers.named(case, entry["cases"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--version-results", type=Path, help="write the outcome of each test here")
    parser.addoption(
        "--again", action="store_true", help="skip tests that passed according to the file"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--version-results")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(path))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the ledger before tests are deselected, because an entry may name only slow tests."""
    for entry in entries():
        if applies(entry):
            for item in excused(entry, items):
                item.add_marker(pytest.mark.xfail(reason=entry["reason"], strict=True))
    if config.getoption("--again"):
        seen = outcomes(config.getoption("--version-results"))
        left_out = [item for item in items if seen.get(item.nodeid) in DONE]
        items[:] = [item for item in items if seen.get(item.nodeid) not in DONE]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """In JAX before 0.8, clear cached traces, which contain the source lines of the first call."""
    if "cause" in item.name and applies({"jax": "<0.8"}):
        import jax

        jax.clear_caches()


def excused(entry: dict[str, Any], items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the test cases that an entry of the ledger names."""
    return [item for item in items if any(_matches(item, test, entry) for test in entry["tests"])]


def stale_lines(items: list[pytest.Item]) -> list[str]:
    """Return tests that the ledger names but that do not exist in the collected test files."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(tiers.function_of(item.nodeid), []).append(item)
    files = {name.partition("::")[0] for name in functions}
    return [
        test
        for entry in entries()
        for test in entry["tests"]
        if test.partition("::")[0] in files
        and not any(_matches(item, test, entry) for item in functions.get(test, ()))
    ]
