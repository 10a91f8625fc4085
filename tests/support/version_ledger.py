"""A pytest plugin for `tests.support.versions`: a fair part of the quick tests, and the ledger.

Of each test function those cases run first that meet most pairs of its axes' values
(`tiers.covering`); `--version-part k` takes the k-th of these, so that several versions together
see more than each alone. Files about PyTorch and JAX themselves, in `WHOLE`, run whole.

`version_ledger.toml` says what a version itself cannot do, a test and a reason a line. Such a test
is expected to fail: one that passes is an error, and so is a line that names no test.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tests.support import tiers

LEDGER = Path(__file__).with_suffix(".toml")
WHOLE = """tests/torch/test_upstream.py tests/torch/test_wrong_gradients.py
    tests/torch/test_plain_programs.py tests/torch/test_patches.py tests/jax/test_upstream.py
    tests/house/test_versions.py""".split()


def applies(entry: dict[str, Any]) -> bool:
    """Whether an entry is about the versions that are installed here."""
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
    """The ledger: tests, cases of these or all, versions of `torch`, `jax` or `flax`, a reason."""
    return tomllib.loads(LEDGER.read_text(encoding="utf-8"))["limit"]


def _case(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _matches(item: pytest.Item, entry: dict[str, Any]) -> bool:
    if tiers.function_of(item.nodeid) not in entry["tests"]:
        return False
    return "cases" not in entry or tiers.named(_case(item), entry["cases"])


def chosen(items: Sequence[pytest.Item], part: int) -> Iterator[pytest.Item]:
    """The cases of one test function that the k-th version runs: one for each backend."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        backend = next((b for b in ("torch", "jax") if b in _case(item).split("-")), "")
        cases.setdefault(backend, []).append(item)
    for some in cases.values():
        count = min(part, len(some) - 1) + 1
        order = tiers.covering([_case(item).split("-") for item in some], count)
        yield some[order[-1]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--version-part", type=int, default=0, help="which cases of each function")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(tiers.function_of(item.nodeid), []).append(item)
    ledger = [entry for entry in entries() if applies(entry)]
    part, kept = config.getoption("--version-part"), set()
    for name, some in functions.items():
        whole = name.partition("::")[0] in WHOLE
        kept |= {item.nodeid for item in (some if whole else chosen(some, part))}
        for entry in ledger:
            for item in some:
                if _matches(item, entry):
                    kept.add(item.nodeid)
                    item.add_marker(pytest.mark.xfail(reason=entry["reason"], strict=True))
    files = {name.partition("::")[0] for name in functions}
    for entry in () if config.option.keyword else ledger:
        for test in entry["tests"]:
            named = functions.get(test, ())
            if test.partition("::")[0] in files and not any(_matches(i, entry) for i in named):
                raise pytest.UsageError(f"{LEDGER.name} names no test that runs: {test}")
    left_out = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    config.hook.pytest_deselected(items=left_out)
