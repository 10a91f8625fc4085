"""docs/gallery.md is written by its programs, and what it says of JAX's is so."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch")

import numpy as np  # noqa: E402  (only where both frameworks are installed)
import torch  # noqa: E402

from tests.support.gallery import PAGE, PICTURES_AT, page, pictures  # noqa: E402
from tests.support.gallery_jax import PICTURES  # noqa: E402

BY_NAME = {picture.name: picture for picture in PICTURES}
tensor = lambda x: torch.from_numpy(np.array(x))


def by_jax(picture):
    """What goes in, and what JAX itself makes of it, under the graph's names."""
    leaves, tree = jax.tree.flatten_with_path(picture.args)
    flat = lambda *xs: picture.f(*jax.tree.unflatten(tree, xs))
    args = {f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])}": x for path, x in leaves}
    at = jax.random.split(jax.random.key(0))
    y, pullback = jax.vjp(flat, *args.values())
    ct = jax.random.normal(at[0], y.shape, y.dtype)
    given = {**args, "cotangent of output": ct}
    out = {"output": y, **{f"gradient of {n}": g for n, g in zip(args, pullback(ct), strict=True)}}
    if picture.order == 2:
        (x,) = args.values()
        g, pullback = jax.vjp(lambda x, ct: jax.vjp(flat, x)[1](ct)[0], x, ct)
        given["cotangent of gradient of argument 0"] = v = jax.random.normal(
            at[1], g.shape, g.dtype
        )
        names = ("argument 0", "cotangent of output")
        out |= {f"second gradient of {n}": s for n, s in zip(names, pullback(v), strict=True)}
    return [{name: tensor(x) for name, x in xs.items()} for xs in (given, out)]


def test_the_page_and_its_pictures_are_written_by_the_programs():
    assert PAGE.read_text() == page(), "run python -m tests.support.gallery"
    for picture in pictures():
        drawn = (PICTURES_AT / f"{picture.name}.svg").read_text()
        assert drawn == picture.graph().to_svg(), (
            f"{picture.name}: run python -m tests.support.gallery"
        )
