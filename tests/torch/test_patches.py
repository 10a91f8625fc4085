"""Patches of PyTorch's classes are thread-local, can be nested, and are removed afterwards."""

import threading
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

import gradtools.torch as gt  # noqa: E402  (only where PyTorch is installed)
from gradtools.seeing.torch import _upstream as upstream  # noqa: E402
from gradtools.seeing.torch import thread_patches as patches  # noqa: E402
from gradtools.seeing.torch.recording import recorder  # noqa: E402

HOLDERS = [
    *((patches.functions_applied, kind, "apply") for kind in upstream.Functions),
    (patches.parameters_made, type(torch.nn.Parameter), "__call__"),
    (patches.control_flow_called, torch._ops.HigherOrderOperator, "__call__"),
]


def _plainly(owner, beneath, args, kwargs):
    return beneath(*args, **kwargs)


@pytest.mark.parametrize(("patch", "holder", "name"), HOLDERS)
def test_blocks_of_threads_that_end_crosswise_leave_the_class_as_it_was(patch, holder, name):
    before = vars(holder).get(name)
    here, there = patch(_plainly), patch(_plainly)
    other = lambda step: [threading.Thread(target=step)]
    here.__enter__()
    for thread in other(there.__enter__):
        thread.start(), thread.join()
    here.__exit__(None, None, None)
    assert vars(holder).get(name) is not before  # the other thread's patch is still active
    for thread in other(lambda: there.__exit__(None, None, None)):
        thread.start(), thread.join()
    assert vars(holder).get(name) is before


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x > 0.5).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return g


BOUND = Through.apply


class Holder(torch.nn.Module):
    of_class = Through.apply

    def __init__(self):
        super().__init__()
        self.own, self.several = Through.apply, [Through.apply]
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.of_class(x) + self.own(x) + self.several[0](x) * self.weight


WAYS = {
    "class": lambda x: Through.apply(x).sum(),
    "directly": Through.apply,
    "global": lambda x: BOUND(x).sum(),
    "module": Holder(),
}


@pytest.mark.parametrize("bound", WAYS)
def test_a_users_function_is_one_link_for_who_records_it(bound):
    f, x = WAYS[bound], torch.linspace(0, 1, 4)
    assert "Nothing is lost" in str(gt.why_zero(f, x)) and "vjp[Through]" in str(gt.formula(f, x))
    assert "custom rule Through" in str(gt.gradient_graph(f, x))


def test_why_zero_follows_a_function_that_no_patch_sees(monkeypatch):
    """Simulate PyTorch 2.14, in which a bound `apply` is a C function."""
    unseen = lambda around: nullcontext()
    monkeypatch.setattr(recorder, "functions_applied", unseen)
    for f in (lambda x: Through.apply(x).sum(), lambda x: Through.apply(x * 2).exp().sum()):
        assert not gt.why_zero(f, torch.linspace(0, 1, 4))
    (finding,) = gt.why_zero(lambda x: Through.apply(x.detach()).sum(), torch.ones(2))
    assert finding.kind == "detached"
