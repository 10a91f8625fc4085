"""Each row of the page of upstream bugs describes the behavior of the installed frameworks."""

from __future__ import annotations

import re

import pytest

from tests.support import upstream_reports
from tests.support.upstream_bugs_page import NAMED, PAGE, RIGHT, SHOWN, page, row_of

UNSEEN = {  # bugs that `checked` does not report: complex silu, and errors at single points
    ("sinc", "tangent of the gradient"),
    ("linalg.det", "gradient"),
    ("linalg.det", "tangent"),
    ("nn.functional.silu", "tangent"),
}


@pytest.mark.parametrize(
    ("row", "wrong"), SHOWN, ids=lambda x: x if isinstance(x, str) else x.operation
)
def test_plain_pytorch_is_wrong_and_checked_names_a_wrong_number(row, wrong):
    """If PyTorch's derivative is correct, upstream has fixed the bug: remove the row."""
    found = row_of(row, wrong)
    assert found.plain != RIGHT
    if (row.operation, wrong) not in UNSEEN:
        assert found.ours in (NAMED, RIGHT, "an error", "a refusal")


@pytest.mark.slow
def test_the_page_is_what_its_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.slow
def test_the_reports_are_what_their_script_writes():
    kept = {path.name: path.read_text("utf-8") for path in upstream_reports.FOLDER.iterdir()}
    assert kept == upstream_reports.pages()


@pytest.mark.parametrize("report", upstream_reports.REPORTS, ids=lambda report: report.name)
def test_a_report_shows_a_wrong_number(report):
    printed = (upstream_reports.FOLDER / f"{report.name}.md").read_text("utf-8")
    given, expected = map(float, re.findall(r"^[\w ]+: (\S+)$", printed, re.MULTILINE))
    # `not x <= y` is also true if x is NaN
    assert not abs(given - expected) <= 1e-3 * max(1, abs(expected))
