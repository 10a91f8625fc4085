"""docs/gallery.md is written by its programs, and what it says of JAX's is so."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch")

import numpy as np  # noqa: E402  (only where both frameworks are installed)
from gallery import PAGE, PICTURES_AT, page, pictures  # noqa: E402
from gallery_jax import PICTURES, penalty  # noqa: E402

import gradtools.jax as gt  # noqa: E402

BY_NAME = {picture.name: picture for picture in PICTURES}


def test_the_page_and_its_pictures_are_written_by_the_programs():
    assert PAGE.read_text() == page(), "run python tests/support/gallery.py"
    for picture in pictures():
        drawn = (PICTURES_AT / f"{picture.name}.svg").read_text()
        assert drawn == picture.graph().to_svg(), (
            f"{picture.name}: run python tests/support/gallery.py"
        )


def test_in_jax_the_second_gradient_of_sinh_is_there():
    picture = BY_NAME["jax_sinh"]
    (x,) = picture.args
    graph = picture.graph()
    assert {node.mark for node in graph.nodes if node.operation in ("exp", "divide")} == {
        "custom rule"
    }
    assert not [node for node in graph.nodes if node.operation == "missing" or node.loss]
    assert "→ second gradient of x = " in str(graph)
    second = gt.grad(lambda x: gt.grad(lambda x: picture.f(x).sum())(x).sum())(x)
    np.testing.assert_allclose(second, np.sinh(x), rtol=1e-6)


def test_in_jax_what_the_penalty_keeps_is_what_is_measured():
    picture = BY_NAME["jax_wgan_gp"]
    graph = picture.graph()
    assert sum(graph.kept.values()) == gt.measure(penalty, *picture.args).saved_bytes
    assert [graph.values[v].spoken for v in graph.outputs[1:]] == [
        "gradient of params['v']",
        "gradient of params['w']",
        "gradient of x",
    ]
