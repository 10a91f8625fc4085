"""Tests the marks of quick tests, and the sampled test cases, which form covering arrays."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest

from tests.support.tiers import covering, in_turn, named, seconds_here

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
AXES = [("torch", "jax"), ("grad", "jvp", "hvp"), ("eager", "vmap", "compile"), ("1", "2", "3")]


def pairs_of(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_a_sample_meets_every_two_values_in_a_fraction_of_the_product():
    rows = list(product(*AXES))
    few = covering(rows, 14)
    assert pairs_of(rows[k] for k in few) == pairs_of(rows)
    assert len(set(few)) == 14 < len(rows) / 3


def test_a_longer_sample_begins_with_the_shorter_one_and_is_the_same_each_time():
    rows = list(product(*AXES))
    assert covering(rows, 9) == covering(rows, 30)[:9]
    assert sorted(covering(rows, 100)) == list(range(len(rows)))


def test_of_a_single_axis_cases_far_from_each_other_are_taken():
    few = sorted(covering([[str(k)] for k in range(100)], 5))
    assert all(b - a >= 10 for a, b in pairwise(few))


def test_a_value_is_named_between_hyphens_and_a_tuple_names_values_that_meet():
    assert named("torch-compile", ["compile"]) and not named("torch-compiled", ["compile"])
    assert named("jax-check_grads, order 3", ["check_grads, order 3"])
    both = [("jax", "compile")]
    assert named("jax-compile", both) and not named("torch-compile", both)


def test_one_in_so_many_has_its_turn():
    assert [not in_turn(k, 3) for k in range(4)] == [True, False, False, True]


def test_a_slower_machine_has_more_time_and_none_has_less():
    assert seconds_here(2.0) >= 2.0


STALE = """
import sys, pytest
from tests.support import tiers, version_ledger

class Names:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        self.stale = [*tiers.stale_values(items), *version_ledger.stale_lines(items)]

names = Names()
assert pytest.main(["--collect-only", "-qq", "tests"], plugins=[names]) == 0
sys.exit(", ".join(names.stale) or 0)
"""


@pytest.mark.slow
def test_each_mark_on_a_value_and_each_line_of_the_ledger_names_a_case():
    done = subprocess.run(
        [sys.executable, "-c", STALE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == "" and done.returncode == 0, done.stderr


TABLE = """
import pytest

@pytest.mark.parametrize("b", ["torch", "jax"])
@pytest.mark.parametrize("a", ["grad", "hvp"])
@pytest.mark.slow_at(("torch", "hvp"))
@pytest.mark.sweep_at(("jax", "hvp"))
def test_named(a, b): pass

@pytest.mark.parametrize("k", ["one", "two", "three"])
@pytest.mark.quick_at("two")
def test_others(k): pass

@pytest.mark.parametrize("k", range(9))
@pytest.mark.sampled(2, 5)
def test_sample(k): pass
"""
CONFTEST = """
import pytest
from tests.support import tiers

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    tiers.mark_tiers(items)
    print(tiers.stale_values(items))
"""


@pytest.mark.parametrize(
    ("expression", "count"), [("not slow and not sweep", 2 + 1 + 2), ("not sweep", 3 + 3 + 5)]
)
def test_marks_on_a_function_choose_its_cases(pytester, expression, count):
    pytester.makepyfile(TABLE)
    pytester.makeconftest(CONFTEST)
    result = pytester.inline_run("-m", expression, "-p", "no:cacheprovider", "-W", "ignore")
    result.assertoutcome(passed=count)


def test_a_value_that_no_case_has_is_told(pytester):
    pytester.makepyfile(TABLE.replace('"two")', '"two", "gone")'))
    pytester.makeconftest(CONFTEST)
    result = pytester.runpytest_inprocess("-s", "--collect-only", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*test_others: quick_at('gone')*"])
