"""Every bad call of `bad_inputs.py` is refused with its text, word for word, and leaves nothing."""

from __future__ import annotations

import re
from types import CodeType

import numpy as np
import pytest
from bad_inputs import BAD, Bad
from derivative_table import lift
from state_of_process import changes, everything

from gradtools import GradtoolsError


def without_what_changes(text: str) -> str:
    """The text with placeholders for addresses and for lines of these tests."""
    text = re.sub(r" at \S+\.py:\d+", " at PLACE", text)
    text = re.sub(r"\(\S+\.py:\d+\)", "(PLACE)", text)
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text)


def test_the_table_holds_more_than_two_hundred_calls_of_every_operator(gt):
    assert len({bad.name for bad in BAD}) == len(BAD) > 200
    called = {name for bad in BAD for name in names_in(bad.call.__code__)}
    assert set(gt.__all__) - called == {"is_replaying"}  # which takes nothing


def names_in(code: CodeType) -> set[str]:
    inside = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {*code.co_names, *(name for names in inside for name in names)}


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_call_is_refused_with_its_text(bad: Bad, gt, backend_name):
    def array(x: np.ndarray) -> object:
        return lift(backend_name, x)

    array(np.ones(1))
    before = everything()
    with pytest.raises(Exception) as caught:
        bad.call(gt, array)
    assert changes(before, everything()) == []
    expected = bad.jax if bad.jax and backend_name == "jax" else bad.text
    assert without_what_changes(str(caught.value)) == expected
    assert isinstance(caught.value, GradtoolsError) != bool(bad.native)


@pytest.mark.parametrize("bad", [bad for bad in BAD if not bad.native], ids=str)
def test_a_text_begins_with_what_was_asked_and_ends_as_a_sentence(bad: Bad):
    for text in filter(None, (bad.text, bad.jax)):
        asked = re.match(
            r"(custom_rule |host function |rule )?['<\w>.]+(\(.*?\))?( has|:|\.| closes| of)", text
        )
        assert asked, text
        assert text.endswith((".", "?")), text
