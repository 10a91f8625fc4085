"""Programs that tests compile by hand are those that a user gets, though the rest is quick."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import re
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)

def f(w, x):
    step = lambda x, _: (jnp.tanh(jnp.sin(x) @ w) * jnp.cos(x).sum(0), x)
    last, all = jax.lax.scan(step, x, None, length=3)
    return jnp.sum(last * jnp.sort(all, 0)[0])

program = jax.jit(jax.grad(f)).lower(jnp.ones((4, 4)), jnp.ones((6, 4))).compile()
memory = program.memory_analysis()
found = (
    re.sub(r"(metadata|stack_frame_id)=({[^}]*}|\\d+)", "", program.as_text()).split("\\nFile")[0],
    sorted(program.cost_analysis().items()),
    memory.temp_size_in_bytes,
    memory.generated_code_size_in_bytes,
)
"""


@pytest.mark.slow
def test_what_is_compiled_by_hand_is_what_a_user_compiles():
    namespace = {}
    exec(PROGRAM, namespace)
    plain = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + "print(found)"], env=plain, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(namespace["found"])
