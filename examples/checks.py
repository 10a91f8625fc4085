"""Checks the derivatives of custom rules and the memory of training steps in several examples."""

import weakref

import numpy as np
from common import claim, difference, flat

STEP = 1e-4


def every_derivative(gt, backend, f, x, t, by_hand=None, forward_twice=True, tolerance=1e-12):
    """Compares value, gradient, Hessian products, vmap and compiled code of f with a reference.

    Args:
        gt: The module `gradtools.torch` or `gradtools.jax`.
        backend: The backend's name.
        f: A function from a vector to a number.
        x: The NumPy array at which f is checked.
        t: The direction of the Hessian products, a NumPy array.
        by_hand: The expected f(x), gradient, and Hessian times t. If None, the reference is
            computed by central differences of f and of its gradient.
        forward_twice: Whether forward mode over forward mode is supported.
        tolerance: The tolerance for `by_hand`; central differences have a separate tolerance.

    Returns:
        The computed value, gradient and Hessian product of f.
    """
    at, along = gt.asarray(x), gt.asarray(t)
    value, gradient = (flat(gt, part) for part in gt.value_and_grad(f)(at))
    expected = by_hand or by_differences(gt, backend, f, x, t)
    allowed = tolerance if by_hand else 1e-7
    what = "the closed form" if by_hand else "central differences"
    forward = flat(gt, gt.jvp(f, (at,), (along,))[1])
    found = {
        "value": difference(value, np.ravel(expected[0])),
        "gradient": difference(gradient, expected[1]),
        "forward mode": difference(forward, np.ravel(expected[1] @ t)),
    }
    claim(f"error against {what}: {listed(found)}", worst(found) < allowed)

    found = {way: difference(flat(gt, of(gt, f, at, along)), expected[2]) for way, of in MIXES}
    if forward_twice:
        twice = gt.jvp(lambda x: gt.jvp(f, (x,), (along,))[1], (at,), (along,))[1]
        found["forward over forward"] = difference(flat(gt, twice), np.ravel(expected[2] @ t))
    claim(f"error of the Hessian times t: {listed(found)}", worst(found) < allowed)

    def three(x):
        (slope,), (product,) = gt.hvp(f, (x,), (along,))
        return f(x), slope, product

    exact = flat(gt, three(at))
    rows = gt.vmap(gt.value_and_grad(f))(gt.asarray(np.stack([x, x + 0.01 * t])))
    second = flat(gt, gt.value_and_grad(f)(gt.asarray(x + 0.01 * t)))
    both = [np.concatenate([flat(gt, part[i]) for part in rows]) for i in (0, 1)]
    found = {
        "vmap": max(difference(both[0], exact[: -x.size]), difference(both[1], second)),
        "compiled": difference(flat(gt, compiled(gt, backend, three)(at)), exact),
    }
    claim(f"difference from eager execution: {listed(found)}", worst(found) < tolerance)
    return gt.asarray(value), gt.asarray(gradient), gt.asarray(exact[-x.size :])


MIXES = (
    (
        "reverse over reverse",
        lambda gt, f, x, t: gt.grad(lambda x: (gt.grad(f)(x) * t).sum())(x),
    ),
    ("forward over reverse", lambda gt, f, x, t: gt.jvp(gt.grad(f), (x,), (t,))[1]),
    ("reverse over forward", lambda gt, f, x, t: gt.grad(lambda x: gt.jvp(f, (x,), (t,))[1])(x)),
)


def by_differences(gt, backend, f, x, t):
    """Returns f(x), the gradient, and the Hessian times t, computed by central differences."""
    steps = STEP * np.eye(x.size)
    of_value, of_slope = f, gt.grad(f)
    if backend == "jax":
        of_value, of_slope = gt.compile(of_value), gt.compile(of_slope)
    value = lambda x: float(of_value(gt.asarray(x)))
    slope = lambda x: flat(gt, of_slope(gt.asarray(x)))
    gradient = np.array([central(value, x, step) for step in steps])
    return value(x), gradient / STEP, central(slope, x, STEP * t) / STEP


def central(f, x, step):
    """Returns the derivative of f at x along `step`, by a fourth-order central difference."""
    near = f(x + step) - f(x - step)
    return (8 * near - (f(x + 2 * step) - f(x - 2 * step))) / 12


def compiled(gt, backend, f):
    """Compiles f as one program; in PyTorch, `fullgraph=True` turns graph breaks into errors."""
    if backend == "jax":
        return gt.compile(f)
    import torch

    torch.compiler.reset()  # torch.compile limits the number of recompilations
    return gt.compile(f, fullgraph=True, backend="aot_eager")


def refused(f, error, *parts):
    """Returns the message of f's error if the message contains all `parts`, otherwise None."""
    try:
        f()
    except error as found:
        text = " ".join(str(found).split())
        return text if all(part in text for part in parts) else None
    return None


def worst(found):
    return max(found.values())


def listed(found):
    return ", ".join(f"{name} {off:.0e}" for name, off in found.items())


# --- memory --------------------------------------------------------------------------------------


def compiled_bytes(step, *args):
    """Compiles a JAX program without running it and returns its temporary memory in bytes."""
    import jax

    return jax.jit(step).lower(*args).compile().memory_analysis().temp_size_in_bytes


def live_bytes(step, *args):
    """Returns the peak bytes of the storages that a PyTorch step creates."""
    with peak_bytes() as peak:
        step(*args)
    return peak.most


def peak_bytes():
    """Returns a context manager whose attribute `most` is the peak of live PyTorch bytes."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Peak(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.live, self.now, self.most = set(), 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor) and not func.is_view:
                    self.note(x.untyped_storage())
            return out

        def note(self, storage):
            key, size = storage._cdata, storage.nbytes()
            if key not in self.live:
                self.live.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.drop, key, size)

        def drop(self, key, size):
            self.live.discard(key)
            self.now -= size

    return Peak()
