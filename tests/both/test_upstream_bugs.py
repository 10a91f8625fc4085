"""The page of what the frameworks get wrong says what is so, row by row."""

from __future__ import annotations

import pytest

from tests.support.upstream_bugs_page import PAGE, RIGHT, SHOWN, page, row_of


@pytest.mark.parametrize(
    ("row", "wrong"), SHOWN, ids=lambda x: x if isinstance(x, str) else x.operation
)
def test_plain_pytorch_is_wrong(row, wrong):
    """Where plain PyTorch is right, upstream has fixed it: take it out of the table."""
    assert row_of(row, wrong).plain != RIGHT


def test_the_page_is_what_its_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page()
