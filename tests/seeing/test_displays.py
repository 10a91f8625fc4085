"""In notebooks, the HTML of reports and tables contains the same words as the plain text."""

from __future__ import annotations

import html
import re

import numpy as np
import pytest

from gradtools import printing
from gradtools.testing import Comparison, Report

X = np.float32([0.3, -0.8])


def words(shown: str) -> str:
    """Return the text of HTML without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", shown))


def test_coloured_text_keeps_its_words_and_gets_spans():
    shown = printing.coloured("\x1b[31ma < b\x1b[0m & c")
    assert words(shown) == "a < b & c"
    assert '<span style="color: #c62828">a &lt; b</span> &amp; c' in shown


def test_a_table_shows_every_cell_and_note_and_no_markup_of_theirs():
    shown = printing.table([("a<b", "1", "<i>")], ["x & y"])
    assert words(shown).split() == ["a<b1<i>", "note:", "x", "&", "y"]
    assert "<i>" not in shown


@pytest.mark.slow_at("jax")
def test_a_report_of_lost_gradients_shows_its_text(gt):
    report = gt.why_zero(lambda x: gt.xp.sum(x**2) + gt.xp.sum(gt.xp.round(x)), gt.asarray(X))
    assert report.findings
    assert words(report._repr_html_()) == str(report)


@pytest.mark.parametrize(("status", "colour"), [("agrees", "#2e7d32"), ("differs", "#c62828")])
def test_a_report_of_agreements_shows_its_table(status, colour):
    one = Comparison("value", "output['a<b']", 0, 2.0, 1e-6, (), 1.0, 2.0, status=status)
    report = Report("port", comparisons=[one])
    assert words(report._repr_html_()) == str(report)
    assert colour in report._repr_html_()


def test_a_graph_shows_a_picture_and_a_formula_its_mathematics(gt):
    x = gt.asarray(X)
    graph = gt.gradient_graph(gt.xp.exp, x)
    assert graph._repr_html_().startswith("<iframe")
    assert gt.formula(gt.xp.exp, x)._repr_latex_().startswith("$$")
