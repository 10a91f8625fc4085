"""gradtools registers, patches and copies nothing in PyTorch outside of its own calls.

The tests compare all kernels of PyTorch's dispatcher and the attributes of its public namespaces
before and after calls of all operators. The tests run in subprocesses, because PyTorch registers
some kernels at their first use.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtools.torch as gt
from gradtools.seeing.torch.thread_patches import as_written
from tests.support.every_operator import POINT, USES, World, healthy

D = torch.float64
KEYS = (
    *("CPU", "CUDA", "Meta", "ZeroTensor", "Conjugate", "Negative", "Python", "ADInplaceOrView"),
    *("AutogradCPU", "AutogradCUDA", "AutogradOther", "Autograd", "AutocastCPU", "Functionalize"),
    *("FuncTorchBatched", "FuncTorchGradWrapper", "BackendSelect", "CompositeImplicitAutograd"),
    "CompositeExplicitAutograd",
)


def registrations():
    """Return the registered kernels of all operators by dispatch key."""
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key
    return {(key, kernel): True for key in KEYS for kernel in kernels(key)}


def attributes():
    """Return the ids of the attributes of PyTorch's public namespaces."""
    places = (torch, torch.Tensor, functional, torch.autograd, torch.autograd.Function, nn.Module)
    places += (torch.autograd.graph, forward_ad, torch.func, torch.overrides, nn.Parameter)
    return {(p.__name__, name): id(value) for p in places for name, value in vars(p).items()}


def run_everything():
    """Run every public operator once, then compute second derivatives through several layers."""
    x = torch.tensor(POINT)
    for use in USES:
        if "torch" in use.backends:
            use.run(World(gt, healthy(gt), x.clone()))
    second(gt.frozen(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Linear(4, 4), nn.Tanh()).to(D)), (2, 4))
    second(gt.frozen(nn.LSTM(4, 4).to(D)), (3, 4), lambda found: found[0])
    heads = nn.MultiheadAttention(4, 2, dtype=D)
    second(gt.frozen(lambda z: heads(z, z, z, need_weights=False)[0]), (3, 1, 4))


def second(G, shape, part=lambda found: found):
    """Return derivatives of the gradient of a function of G(z) with respect to y and z."""
    z, y = torch.ones(shape, dtype=D).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    value = (y * part(G(z))).pow(2).sum()
    (slope,) = torch.autograd.grad(value, z, create_graph=True)
    return torch.autograd.grad(slope.pow(2).sum(), (y, z))


def changed(before, after):
    return sorted(str(k) for k in before | after if before.get(k) != after.get(k))


def told_by(program):
    """Return the output of a program in a subprocess."""
    lines = ["import sys, warnings", f"sys.path[:0] = {sys.path!r}"]
    text = "\n".join([*lines, "warnings.simplefilter('ignore')", textwrap.dedent(program)])
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_no_operator_registers_a_kernel_or_changes_what_stands_in_torch():
    program = """
        import torch, torch._dynamo, torch._meta_registrations, torch._refs
        torch.vmap(torch.sin)(torch.ones(2))  # registers the decompositions
        import gradtools.torch.host  # registers gradtools' only operator
        from tests.torch.test_nothing_outside_a_call import *

        before, stood = registrations(), attributes()
        run_everything()
        assert len(before) > 1000
        print(changed(before, registrations()), changed(stood, attributes()))
    """
    assert told_by(program) == "[] []"


# --- functions that users patch --------------------------------------------------------------


def sharper(query, key, value, *args, **kwargs):
    return torch.softmax(3 * query @ key.transpose(-2, -1), -1) @ value.sin()


def doubled(x, weight, bias=None):
    return 2 * torch.matmul(x, weight.T) + (0 if bias is None else bias)


PATCHES = [
    ("scaled_dot_product_attention", sharper, False),
    ("linear", doubled, False),
    ("linear", doubled, True),
]


@pytest.mark.parametrize(("name", "patch", "weights"), PATCHES)
def test_a_function_that_is_patched_later_is_the_one_that_is_differentiated(
    name, patch, weights, monkeypatch
):
    """Attention libraries patch torch.nn.functional; double backward gives the expected values."""
    torch.manual_seed(0)
    heads = nn.MultiheadAttention(4, 2, batch_first=True, dtype=D).requires_grad_(False)
    G = lambda z: heads(z, z.sin(), z.cos(), need_weights=weights)[0]
    with sdpa_kernel(SDPBackend.MATH):
        plain = second(G, (2, 3, 4))
        monkeypatch.setattr(functional, name, patch)
        expected, found = second(G, (2, 3, 4)), second(gt.frozen(G), (2, 3, 4))
        pushed = gt.jvp(G, (Z,), (Z.cos(),))[1]
    assert not torch.allclose(plain[0], expected[0])
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs)
    torch.testing.assert_close(pushed, (G(Z + E * Z.cos()) - G(Z - E * Z.cos())) / (2 * E))


Z, E = torch.linspace(-1, 1, 24, dtype=D).reshape(2, 3, 4), 1e-6


def test_threads_that_run_compiled_code_as_written_leave_the_compilers_stance():
    """The first thread exits `as_written` before the second thread, which entered it later."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    first_entered, second_entered = threading.Event(), threading.Event()

    def first():
        with as_written():
            first_entered.set()
            assert second_entered.wait(60)

    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(first)
        assert first_entered.wait(60)
        with as_written():
            second_entered.set()
            one.result(60)
    graphs = []
    torch.compile(lambda x: x.cos(), backend=lambda g, _: graphs.append(g) or g)(torch.ones(2))
    assert graphs
