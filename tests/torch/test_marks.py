"""What gradtools does for its own ends says so where it runs, whatever its files are called."""

from __future__ import annotations

import importlib.util
import sys

import torch

from gradtools.torch import operation_marks

ROOM = """
from gradtools.torch.compiling import left_to_python
left_to_python(__name__)

def add(x):
    return x + 1
"""


def test_a_room_that_says_so_is_left_to_python_under_any_name(tmp_path, monkeypatch):
    from torch._dynamo.testing import CompileCounter

    (tmp_path / "some_room_of_ours.py").write_text(ROOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("some_room_of_ours")
    assert spec is not None
    import some_room_of_ours

    monkeypatch.setitem(sys.modules, "some_room_of_ours", some_room_of_ours)
    counter = CompileCounter()
    f = torch.compile(lambda x: some_room_of_ours.add(x * 2) * 3, backend=counter)
    assert f(torch.ones(2)).tolist() == [9.0, 9.0]
    assert counter.frame_count == 2  # before and after, and not the room itself
    assert counter.op_count == 2


def test_a_detach_of_our_own_says_for_whose_sake_and_ends_with_it():
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, fun, types, args=(), kwargs=None):
            seen.append(operation_marks.reason_of_detach())
            return fun(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Watch():
        operation_marks.detached(x, operation_marks.CHUNK)
        x.detach()
        operation_marks.data_of(x, operation_marks.DERIVATIVE)
    assert seen == [operation_marks.CHUNK, "", operation_marks.DERIVATIVE]
    assert operation_marks.reason_of_detach() == ""


def test_functions_of_ours_are_told_from_the_users_by_their_class():
    from gradtools.torch.freezing import _Constants
    from gradtools.torch.recomputation import _Node
    from gradtools.torch.rules.functions import RuleFunction

    class Mine(torch.autograd.Function):
        pass

    assert operation_marks.function_of_ours(_Constants) == "frozen"
    assert operation_marks.function_of_ours(_Node) == "chunked"
    assert operation_marks.function_of_ours(RuleFunction) == operation_marks.RULE
    assert operation_marks.function_of_ours(Mine) is None
