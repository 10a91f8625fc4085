"""docs/gallery.md and its pictures match the output of tests/support/gallery.py."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch")


from tests.support.gallery import PAGE, PICTURES_AT, page, pictures  # noqa: E402


def test_the_page_and_its_pictures_are_written_by_the_programs():
    assert PAGE.read_text() == page(), "run python -m tests.support.gallery"
    for picture in pictures():
        drawn = (PICTURES_AT / f"{picture.name}.svg").read_text()
        assert drawn == picture.graph().to_svg(), (
            f"{picture.name}: run python -m tests.support.gallery"
        )
