"""The page of what the frameworks get wrong says what is so, row by row."""

from __future__ import annotations

import pytest

from tests.support.upstream_bugs_page import NAMED, PAGE, RIGHT, SHOWN, page, row_of

UNSEEN = {  # which `checked` does not name: a complex silu, an error at one point alone
    ("sinc", "tangent of the gradient"),
    ("linalg.det", "gradient"),
    ("linalg.det", "tangent"),
    ("nn.functional.silu", "tangent"),
}


@pytest.mark.parametrize(
    ("row", "wrong"), SHOWN, ids=lambda x: x if isinstance(x, str) else x.operation
)
def test_plain_pytorch_is_wrong_and_checked_names_a_wrong_number(row, wrong):
    """Where plain PyTorch is right, upstream has fixed it: take it out of the table."""
    found = row_of(row, wrong)
    assert found.plain != RIGHT
    if (row.operation, wrong) not in UNSEEN:
        assert found.ours in (NAMED, RIGHT, "an error", "a refusal")


def test_the_page_is_what_its_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page()
