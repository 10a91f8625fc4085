"""Patches of PyTorch's classes: of one thread, one inside of another, and gone afterwards."""

import threading

import pytest

torch = pytest.importorskip("torch")

from gradtools.torch import patches  # noqa: E402  (only where PyTorch is installed)

HOLDERS = [
    (patches.functions_applied, torch.autograd.function._SingleLevelFunction, "apply"),
    (patches.parameters_made, type(torch.nn.Parameter), "__call__"),
    (patches.control_flow_called, torch._ops.HigherOrderOperator, "__call__"),
    (patches.scripts_called, torch.jit.ScriptFunction, "__call__"),
]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


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
    assert vars(holder).get(name) is not before  # the other block goes on
    for thread in other(lambda: there.__exit__(None, None, None)):
        thread.start(), thread.join()
    assert vars(holder).get(name) is before


def test_blocks_stand_inside_of_each_other():
    seen = []

    def noting(name):
        def around(owner, beneath, args, kwargs):
            seen.append((name, owner))
            return beneath(*args, **kwargs)

        return around

    with patches.functions_applied(noting("outer")), patches.functions_applied(noting("inner")):
        assert Double.apply(torch.ones(())).item() == 2.0
    assert seen == [("inner", Double), ("outer", Double)]


def test_calls_of_other_threads_pass():
    seen, found = [], []
    with patches.functions_applied(lambda *call: seen.append(call)):
        thread = threading.Thread(target=lambda: found.append(Double.apply(torch.ones(()))))
        thread.start(), thread.join()
    assert not seen and found[0].item() == 2.0
