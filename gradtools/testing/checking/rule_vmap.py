"""Compares a function under vmap with a loop over the examples.

A rule is written for one example, and the framework batches it. Mistakes are possible in a host
kernel with `vectorized=True`, in a rule with its own vmap, and in code that reads the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtools.testing.checking.derivative_checks import DerivativeCheck
from gradtools.testing.checking.probe import Probe, first_line
from gradtools.testing.flat import Arrays
from gradtools.testing.report import widened

_POINTS = 1.0, 1.0625, 0.9375  # near enough to be in f's domain
_CAUSE = "the examples of a batch are mixed, or its axes are taken for an example's"
_DETAIL = (
    "With vectorized=True a kernel gets the axes of the batch in front of every array, and works "
    "on the last axes alone."
)


def check_batch(probe: Probe, check: DerivativeCheck) -> None:
    """Compares values, and derivatives in the available modes, of a batch of three examples."""
    points = [[(x * c).astype(x.dtype) for x in probe.leaves] for c in _POINTS]
    us, vs = check._everywhere(), check.vs
    flat, gt = probe.flat, probe.gt
    runs: list[tuple[str, Sequence[str], Callable[..., Any], Arrays]] = [
        ("value", probe.out_paths, lambda xs, _: flat(*xs), []),
        ("reverse mode", probe.paths, lambda xs, v: gt.vjp(flat, *xs)[1](list(v)), vs),
        ("forward mode", probe.out_paths, lambda xs, u: gt.jvp(flat, tuple(xs), tuple(u))[1], us),
    ]
    for name, paths, run, vectors in runs:
        if name == "value" or check.present.get(name.split()[0]):
            _compare(probe, check, points, name, paths, run, vectors)


def _compare(
    probe: Probe,
    check: DerivativeCheck,
    points: list[Arrays],
    name: str,
    paths: Sequence[str],
    run: Callable[..., Any],
    moved: Arrays,
) -> None:
    array, numpy = probe.array, probe.numpy
    extra = tuple([array(m) for m in moved])
    try:
        single = [numpy(run(tuple([array(x) for x in xs]), extra)) for xs in points]
        stacked = tuple([array(np.stack(leaf)) for leaf in zip(*points, strict=True)])
        together = numpy(probe.gt.vmap(run, in_axes=(0, None))(stacked, extra))
    except Exception as error:
        check.report.left_out.append(f"{name} in a batch: {first_line(error)}")
        return
    for path, many, *each in zip(paths, together, *single, strict=True):
        ones = np.stack(each)
        noise = check._exact(1) * float(np.max(np.abs(widened(ones)), initial=0.0))
        quantity = f"{name} in a batch | one by one"
        check._compare(quantity, path, many, ones, 1, 10 * noise, _CAUSE, _DETAIL)
