"""What is lost inside a bridged function is told at the other framework's line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools import bridge


def cut_in_torch(t):
    h = torch.tanh(t)
    h = h.detach()  # lost in torch
    return (h**2).sum()


def cut_in_jax(x):
    h = jnp.tanh(x)
    h = jax.lax.stop_gradient(h)  # lost in jax
    return (h**2).sum()


def dead_in_torch(t):
    return torch.relu(t - 5.0).sum()  # dead in torch


TO_JAX = gj, lambda f: lambda x: bridge.to_jax(f)(2 * x)
TO_TORCH = gt, lambda f: lambda x: bridge.to_torch(f)(2 * x)
AROUND = gt, lambda f: lambda x: bridge.to_torch(lambda a: bridge.to_jax(f)(a))(x)


@pytest.mark.parametrize(
    ("host", "f", "kind", "line"),
    [
        (TO_JAX, cut_in_torch, "detached", "lost in torch"),
        (TO_TORCH, cut_in_jax, "detached", "lost in jax"),
        (TO_JAX, dead_in_torch, "dead", "dead in torch"),
        (AROUND, cut_in_torch, "detached", "lost in torch"),
    ],
)
def test_why_zero_names_the_line_in_the_other_framework(host, f, kind, line):
    own, across = host
    report = own.why_zero(across(f), own.asarray(np.ones(3, np.float32)))
    (finding,) = report.findings
    assert finding.kind == kind and finding.source.function == f.__name__
    with open(__file__) as file:
        assert line in file.readlines()[finding.source.line - 1]


def test_why_zero_looks_at_no_other_argument_of_a_bridged_function():
    f = bridge.to_torch(lambda a, b: jax.lax.stop_gradient(a).sum() + jnp.floor(b).sum())
    x = torch.ones(3)
    report = gt.why_zero(lambda a, b: f(a, b), x, x, wrt=(0, 1))
    assert [(one.argument, one.kind) for one in report.findings] == [
        ("argument 0", "detached"),
        ("argument 1", "zero_derivative"),
    ]
    assert (
        not gt.why_zero(lambda a: bridge.to_torch(cut_in_jax)(a) + a.sum() ** 2, x)
        .findings[0]
        .whole
    )
