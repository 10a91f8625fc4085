"""The stand-ins by which JAX's own tests of custom_jvp and custom_vjp run on `custom_rule`.

JAX's file is not part of this project, so here are a few tests of the same form, some of which must
fail. What the benchmark printed of JAX's own is what the page says.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "jax_custom_api.py"


def _program():
    spec = importlib.util.spec_from_file_location("jax_custom_api", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_benchmark_printed():
    printed = (ROOT / "benchmarks" / "results" / "jax_custom_api.md").read_text()
    row = re.search(r"^\| custom_api_test.py \|(.*)\|$", printed, re.MULTILINE)[1]
    every, skipped, passed, rest = map(int, row.split("|"))
    assert "not known" not in printed
    assert passed >= 120 and passed + skipped + rest == every
    page = " ".join((ROOT / "docs" / "migrating-rules.md").read_text().split())
    assert f"{every} tests, of which JAX skips {skipped}" in page
    assert f"{passed} of the {every - skipped} pass, and {rest} do not" in page


@pytest.mark.parametrize("name", _program().REASONS)
def test_each_reason_is_of_a_test_that_did_not_pass(name):
    printed = (ROOT / "benchmarks" / "results" / "jax_custom_api.md").read_text()
    assert f"| {name} |" in printed
