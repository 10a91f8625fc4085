"""What is computed again: programs that PyTorch's own checkpoint runs, against the plain call."""

import collections

import torch

import gradtools.torch as gt
from gradtools.torch.state import Snapshot

Tensor = torch.Tensor


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class _Makes(collections.OrderedDict):
    """Holds classes and gives out instances, as transformers' table of activations does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class _Pretends(collections.OrderedDict):
    """Has keys that it does not hold, as transformers' lazy tables of models do."""

    def __iter__(self):
        return iter(["absent"])

    def __getitem__(self, key):
        raise ValueError(key)


def test_a_dict_of_its_own_class_holds_afterwards_what_it_held():
    table, lazy, count = _Makes(tanh=torch.nn.Tanh), _Pretends(), [0]

    def f(x):
        count[0] += 1
        assert lazy is not None
        return table["tanh"](x)

    x = _numbers(3).requires_grad_()
    gt.checkpoint(f)(x).sum().backward()
    assert dict.__getitem__(table, "tanh") is torch.nn.Tanh
    assert count == [1]
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)


def test_the_order_of_an_ordered_dict_is_put_back():
    table = collections.OrderedDict(a=1, b=2)
    start = Snapshot.of([lambda: table], [])
    table.move_to_end("a")
    assert not start.reached.stands()
    start.restore()
    assert list(table) == ["a", "b"]
