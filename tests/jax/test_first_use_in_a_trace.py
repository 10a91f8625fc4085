"""A room of the JAX wing that is imported within a trace knows when there is none any more."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import jax, numpy as np, gradtools.jax as gt

x, asked = np.float32([1.0, 2.0]), []
f = gt.host_function(np.sin, out=lambda x: asked.append(x) or x)
jax.jit(f)(x)  # the first use of all
asked.clear()
for _ in range(3):
    f(jax.numpy.asarray(x))
assert len(asked) == 1, asked  # outside of a trace it is known from the call before
"""


def test_a_host_function_that_is_first_used_under_jit_is_called_at_once_outside():
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-1500:]
