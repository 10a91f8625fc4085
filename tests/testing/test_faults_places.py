"""Where a call stands: in many threads at once, after a fork, in tracers that leaked.

What is right alone is right there, too, or the error says what is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.every_operator import POINT, USES, Use, World, healthy, leaves
from tests.support.state_of_process import changes, everything
from tests.testing.test_faults import here

ROOT = Path(__file__).parents[2]
THREADS = {"torch": 8, "jax": 3}  # each of JAX's calls compiles
LONG = (
    "frozen",
    "frozen: second order",
    "gradient_graph: twice",
    "formula",
)
SHARED = [use for use in USES if use.name not in LONG]


@pytest.mark.sampled(torch=(20, 50), jax=(8, 50))
@pytest.mark.parametrize("use", SHARED, ids=str)
def test_many_threads_at_once_each_get_what_they_would_alone(use: Use, gt, backend_name):
    here(use, backend_name)
    threads = THREADS[backend_name]
    points = [gt.asarray(POINT * (1 + i / 10)) for i in range(threads)]
    run = lambda x: leaves(gt, use.run(World(gt, healthy(gt), x)))
    alone = [run(x) for x in points]
    before, interval = everything(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(threads) as pool:
            together = list(pool.map(run, points))
    finally:
        sys.setswitchinterval(interval)
    assert changes(before, everything()) == []
    for found, expected in zip(together, alone, strict=True):
        assert_near(found, expected)


def assert_near(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """The same but for the last bits, which PyTorch's kernels round by how memory is aligned."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if a.dtype.kind in "US":
            assert a.tolist() == b.tolist()
        else:
            np.testing.assert_allclose(a, b, rtol=1e-14, atol=0)


# --- fork --------------------------------------------------------------------------------

FORKED = """
import os, sys
import numpy as np
from tests.support.every_operator import POINT, USES, World, healthy, leaves
import gradtools.{backend} as gt
if "{backend}" == "jax":
    import jax
    jax.config.update("jax_enable_x64", True)
NAMES = ("grad", "jvp", "hvp", "clip_gradient", "custom_rule: bwd", "chunked", "random_key")

def found():
    world = lambda: World(gt, healthy(gt), gt.asarray(POINT))
    uses = [use for use in USES if use.name in NAMES]
    return [x.tobytes() for use in uses for x in leaves(gt, use.run(world()))]

first = found() if "{backend}" == "torch" else None  # JAX's own threads do not survive a fork
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"".join(found()))
    os._exit(0)
os.close(writer)
came = b""
while part := os.read(reader, 65536):
    came += part
_, status = os.waitpid(child, 0)
assert status == 0, status
assert came == b"".join(first or found())
print("held", len(came) > 100)
"""


@pytest.mark.slow
@pytest.mark.sweep_at("torch")
def test_a_child_that_was_forked_after_the_import_computes_the_same(backend_name):
    program = FORKED.format(backend=backend_name)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False,
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.stdout.split() == ["held", "True"], found.stderr


# --- what leaked out of a transform --------------------------------------------------------


def test_an_array_that_leaked_out_of_a_transform_is_refused_or_plain(gt, backend_name):
    """JAX names the leak; in PyTorch what is leaked is an ordinary tensor of a graph that ended."""
    leaked = []
    x = gt.asarray(POINT)

    def loss(x):
        leaked.append(x * 2)
        return gt.xp.sum(x * x)

    gt.grad(loss)(x)
    before = everything()
    for run in (
        lambda y: gt.grad(lambda x: gt.xp.sum(x * y))(x),
        lambda y: gt.vjp(lambda x: x * y, x)[1](x),
        lambda y: gt.jvp(lambda x: x * y, (x,), (x,)),
        lambda y: gt.grad(lambda y: gt.xp.sum(y * y))(y),
    ):
        if backend_name == "jax":
            with pytest.raises(Exception, match=r"leaked|side effect"):
                run(leaked[0])
        else:
            assert all(np.isfinite(found).all() for found in leaves(gt, run(leaked[0])))
        assert changes(before, everything()) == []
    assert np.array_equal(gt.to_numpy(gt.grad(loss)(x)), 2 * POINT)
