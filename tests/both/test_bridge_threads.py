"""Calls of bridged functions in many threads cause no hangs, leaks or wrong numbers."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradtools import bridge

THREADS, CALLS = 16, 800


def together(work, each):
    """Run work(i, k) `each` times in each thread; return errors and unfinished threads."""
    wrong = []

    def loop(i):
        try:
            for k in range(each):
                work(i, k)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(THREADS)]
    for t in threads:
        t.start()
    deadline = time.monotonic() + 240
    for t in threads:
        t.join(max(0.0, deadline - time.monotonic()))
    return wrong, [t for t in threads if t.is_alive()]


def in_jax(jit):
    f = bridge.to_jax(lambda x, s: (torch.sin(x) * s).sum())
    grad = jax.grad(f)
    grad = jax.jit(grad) if jit else grad
    base = jnp.linspace(0.0, 1.0, 64)

    def work(i, k):
        s = float(1 + (i * 7 + k) % 5)
        np.testing.assert_allclose(grad(base, jnp.asarray(s)), s * np.cos(base), rtol=1e-12)

    return work


def in_torch():
    f = bridge.to_torch(lambda x, s: (jnp.sin(x) * s).sum())
    base = torch.linspace(0.0, 1.0, 64, dtype=torch.float64)

    def work(i, k):
        x = base.clone().requires_grad_()
        s = float(1 + (i * 7 + k) % 5)
        f(x, torch.tensor(s, dtype=torch.float64)).backward()
        np.testing.assert_allclose(x.grad.numpy(), s * np.cos(base.numpy()), rtol=1e-12)

    return work


KINDS = {
    "eager in JAX": lambda: in_jax(False),
    "jit in JAX": lambda: in_jax(True),
    "torch": in_torch,
}


@pytest.mark.slow_at("jit in JAX")
@pytest.mark.sweep_at("eager in JAX")
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_threads_call_at_once_and_all_are_right(kind):
    work = KINDS[kind]()
    work(0, 0)
    wrong, hung = together(work, 6)
    assert not wrong and not hung


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_calls_neither_hang_nor_leak(kind):
    work = KINDS[kind]()
    together(work, 20)
    gc.collect()
    before, live = resident(), len(gc.get_objects())
    wrong, hung = together(work, CALLS // THREADS)
    gc.collect()
    assert not wrong and not hung
    assert len(gc.get_objects()) - live < 400
    assert resident() - before < 12e6


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
