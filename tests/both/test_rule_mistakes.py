"""`check_rule` reports where each planted mistake is, and accepts correct rules."""

from __future__ import annotations

import pytest

from gradtools import GradtoolsError
from gradtools.testing import check_rule
from tests.both.rule_mistakes import MISTAKES, RIGHT


def test_the_lists_are_long_enough():
    assert len(MISTAKES) >= 28 and len(RIGHT) >= 14
    assert not MISTAKES.keys() & RIGHT.keys()


@pytest.mark.slow_at("a kernel that sums over the batch", ("jax", "cotangents in the wrong order"))
@pytest.mark.sampled(torch=(30, 30), jax=(5, 13))
@pytest.mark.parametrize("mistake", MISTAKES.cases())
def test_a_planted_mistake_is_found_and_named(mistake, gt, backend_name):
    if mistake.only not in ("", backend_name):
        pytest.skip(f"the mistake is only possible in {mistake.only}")
    rule, args = mistake.program(gt)
    with pytest.raises(GradtoolsError) as raised:
        check_rule(rule, args, gt)
    missing = [words for words in mistake.expected if words not in str(raised.value)]
    assert not missing, str(raised.value)


@pytest.mark.slow_at("a saved output", "complex numbers, holomorphic")
@pytest.mark.whole_at(
    ("torch", "a saved output"),
    ("torch", "complex numbers, holomorphic"),
    ("torch", "float32"),
)
@pytest.mark.parametrize("rule", RIGHT.cases())
def test_a_right_rule_passes(rule, gt, backend_name):
    made, args = rule.program(gt)
    assert check_rule(made, args, gt)
