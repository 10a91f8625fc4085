"""The page of what the frameworks get wrong says what is so, row by row."""

from __future__ import annotations

import pytest

from tests.support.upstream_bugs_page import PAGE, RIGHT, SHOWN, page, row_of


@pytest.mark.parametrize("bug", SHOWN, ids=lambda bug: f"{bug.operation}, {bug.wrong}")
def test_plain_pytorch_is_wrong_and_gradtools_is_right(bug):
    """Where plain PyTorch is right, upstream has mended it: take it out of upstream_bugs.py."""
    row = row_of(bug)
    assert row.plain != RIGHT
    assert row.ours == RIGHT


def test_the_page_is_what_its_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page()
