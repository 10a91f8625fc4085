"""`measure` in PyTorch: what its kernels cost, what it leaves as it was, compiled code."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import gradtools
import gradtools.torch as gt
from gradtools.torch.live_bytes import LiveBytes


def flops(f, *args):
    found = gt.measure(f, *args)
    assert found.notes == ()
    return found.flops


# --- kernels -------------------------------------------------------------------------------


def naive_convolution(x, w, stride, padding):
    """Products of a weight and an element that meet, one by one, along one axis."""
    outs = (x + 2 * padding - w) // stride + 1
    return sum(0 <= o * stride + t - padding < x for o in range(outs) for t in range(w))


CONVOLUTIONS = [(1, 0), (1, 1), (2, 1), (3, 2)]


@pytest.mark.sweep_at("1-0", "1-1", "3-2")
@pytest.mark.parametrize(("stride", "padding"), CONVOLUTIONS)
def test_a_convolution_and_its_gradients_count_what_meets(stride, padding):
    x, w = torch.randn(2, 4, 7, 9), torch.randn(6, 4, 3, 3)
    met = naive_convolution(7, 3, stride, padding) * naive_convolution(9, 3, stride, padding)
    once = 2 * met * 2 * 4 * 6
    f = lambda x, w: F.conv2d(x, w, stride=stride, padding=padding)
    assert flops(f, x, w) == once
    outs = f(x, w).numel()
    assert flops(gt.value_and_grad(lambda *a: f(*a).sum(), argnums=(0, 1)), x, w) == (
        3 * once + outs - 1
    )
    assert flops(gt.value_and_grad(lambda *a: f(*a).sum()), x, w) == 2 * once + outs - 1


def test_a_convolutions_bias_and_groups():
    x, w, b = torch.randn(2, 4, 8), torch.randn(6, 2, 3), torch.randn(6)
    f = lambda x, w, b: F.conv1d(x, w, b, groups=2)
    assert flops(f, x, w, b) == 2 * (6 * 3) * 2 * 2 * 6 + 2 * 6 * 6
    both = flops(gt.value_and_grad(lambda b: f(x, w, b).sum()), b)
    assert both == flops(f, x, w, b) + (2 * 6 * 6 - 1) + (2 * 6 * 6 - 6)


@pytest.mark.sweep_at("1")
@pytest.mark.parametrize("stride", [1, 2])
def test_a_transposed_convolution_costs_what_the_convolution_does(stride):
    x, w = torch.randn(2, 4, 9), torch.randn(6, 4, 3)
    forward = lambda x: F.conv1d(x, w, stride=stride)
    ct = torch.randn_like(forward(x))
    back = lambda ct: F.conv_transpose1d(ct, w, stride=stride)
    assert back(ct).shape == x.shape
    assert flops(back, ct) == flops(forward, x)


def test_products_agree_with_pytorchs_own_counter():
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 16)
    with FlopCounterMode(display=False) as theirs:
        model(x).sum().backward()
    model.zero_grad()
    ours = flops(lambda x: model(x).sum().backward(), x)
    elementwise = ours - theirs.get_total_flops()
    assert 0 < elementwise < 0.2 * ours


def test_fused_attention_costs_what_its_parts_do():
    q, k, v = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)

    def by_hand(q, k, v):
        s = q @ k.mT * 0.3535
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return (e / e.sum(-1, keepdim=True)) @ v

    assert flops(F.scaled_dot_product_attention, q, k, v) == flops(by_hand, q, k, v)


WHOLES = {
    "softmax": (lambda x: torch.softmax(x, 1), 12 + 12 + 12 + 2 * 4 * 2),
    "layer norm": (lambda x: F.layer_norm(x, (3,)), 4 * 12 + 4 + 4 + 12 + 12),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.1), 12),
    "mean squared error": (lambda x: F.mse_loss(x, 2 * x), 12 + 12 + 12 + 12),
    "a multiple added": (lambda x: torch.add(x, x, alpha=3), 24),
    "in place": (lambda x: x.clone().add_(x).mul_(2), 24),
    "max pooling": (lambda x: F.max_pool1d(x[None], 3), 4 * 2),
    "largest": (lambda x: torch.max(x, dim=1)[0], 8),
    "added at indices": (lambda x: torch.zeros(5).index_add(0, torch.tensor([0, 0, 1]), x[0]), 3),
    "outer product": (lambda x: torch.outer(x[0], x[0]), 9),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), 2 * 4 * 3 * 4),
    "foreach": (lambda x: torch._foreach_mul([x, x], 2.0), 24),
    "dropout": (lambda x: F.dropout(x, 0.5), 24),
}


@pytest.mark.quick_at("foreach")
@pytest.mark.parametrize("name", WHOLES)
def test_what_is_made_of_other_operations_counts_its_parts(name):
    f, expected = WHOLES[name]
    assert flops(f, torch.randn(4, 3)) == expected


def test_what_is_written_to_out_counts():
    assert gt.measure(lambda x: torch.exp(x, out=torch.empty(4, 3)), torch.randn(4, 3)).flops == 12


def test_an_operation_of_unknown_content_is_named():
    @torch.library.custom_op("measured::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    found = gt.measure(lambda x: opaque(x) + 1, torch.randn(3))
    assert found.flops == 3
    assert found.notes[0] == "not in flops: measured.opaque.default, which no rule counts"


# --- bytes ---------------------------------------------------------------------------------


def test_the_peak_is_counted_storage_by_storage():
    x = torch.randn(1000)
    assert gt.measure(lambda x: x.exp().exp().exp(), x).peak_bytes == 8000
    assert gt.measure(lambda x: x.exp().view(10, 100).T[0], x).peak_bytes == 4000
    assert gt.measure(lambda x: x.clone().exp_().exp_(), x).peak_bytes == 4000
    assert gt.measure(lambda x: x.view(10, 100), x).peak_bytes == 0
    with torch.no_grad():
        needs = x.clone().requires_grad_()
        assert gt.measure(lambda x: x.exp().exp().exp(), needs).peak_bytes == 8000
    assert gt.measure(lambda x: x.exp().exp().exp(), needs).peak_bytes == 12000


def test_results_that_backward_does_not_need_are_not_saved():
    x, w = torch.randn(10, 10), torch.randn(10, 10)
    assert gt.measure(lambda x: x @ w, x).saved_bytes == 0
    assert gt.measure(lambda x: (x @ w, x.exp()), x).saved_bytes == 400


def test_what_a_module_saves_excludes_its_parameters():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    assert gt.measure(net, torch.randn(5, 8)).saved_bytes == 5 * 16 * 4


def test_a_function_of_its_own_holds_what_it_saved_and_what_it_kept():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.exp()  # not by save_for_backward
            return x.clone()

        @staticmethod
        def backward(ctx, ct):
            return ct * ctx.kept

    assert gt.measure(Keeps.apply, torch.randn(100)).saved_bytes == 400


def test_what_f_keeps_for_itself_is_not_saved_for_backward():
    cache = []
    found = gt.measure(lambda x: cache.append(x.detach().exp()) or 2 * x, torch.randn(100))
    assert found.saved_bytes == 0
    assert cache == []


def test_arguments_that_need_no_grad_are_differentiated_along():
    w = torch.randn(10, 10)
    with torch.no_grad():
        assert gt.measure(lambda x: (x @ w).exp(), torch.randn(10, 10)).saved_bytes == 400
    with torch.inference_mode():
        assert gt.measure(lambda x: x.exp(), torch.randn(10, 10)).saved_bytes == 400


def test_live_bytes_numbers_no_storage_twice():
    with LiveBytes() as live:
        numbers = {live.number_of(torch.ones(10) * 2) for _ in range(20)}
    assert len(numbers) == 20 and None not in numbers
    assert live.now == 0


# --- as if it had never run ----------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4)
        )
        self.calls, self.seen, self.rng = 0, [], np.random.default_rng(0)

    def forward(self, x):
        self.calls += 1
        self.seen.append(random.random() + self.rng.random())
        return self.layers(x)


def state_of(net, optimizer):
    tensors = [*net.state_dict().values(), *[p.grad for p in net.parameters()]]
    for held in optimizer.state.values():
        tensors += [held[key] for key in sorted(held)]
    return [None if x is None else x.clone() for x in tensors], (
        net.calls,
        list(net.seen),
        random.getstate(),
        net.rng.bit_generator.state,
        torch.get_rng_state().tolist(),
        [id(p.grad) for p in net.parameters() if p.grad is not None],
        len(optimizer.state),
    )


def same(before, after):
    pairs = zip(before[0], after[0], strict=True)
    return before[1] == after[1] and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs
    )


@pytest.mark.sweep_at("0", "AdamW")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_training_step_is_as_if_it_had_never_run(kind, steps):
    torch.manual_seed(0)
    net = Stateful()
    optimizer = kind(net.parameters(), lr=0.1)
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))

    def step(x):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(steps):
        step(x)
    before = state_of(net, optimizer)
    found = gt.measure(step, x)
    assert same(before, state_of(net, optimizer))
    assert found.flops > 3 * 2 * 6 * (8 * 16 + 16 * 4) - 2 * 6 * 8 * 16
    assert found.flops == gt.measure(step, x).flops
    step(x)
    assert not same(before, state_of(net, optimizer))


def test_arguments_that_f_writes_to_stand_as_they_stood():
    x, n = torch.arange(400_000.0), torch.arange(5)
    found = gt.measure(lambda x, n: (x.mul_(2).sum(), n.add_(1)), x, n)
    assert torch.equal(x, torch.arange(400_000.0)) and n.tolist() == [0, 1, 2, 3, 4]
    assert found.saved_bytes is None and "leaf Variable" in found.notes[0]


@pytest.mark.slow_at("2", "3")
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_after_an_error_everything_stands_as_it_stood(fails_at):
    big, calls = torch.zeros(400_000), []
    count = iter(range(1, 100))

    def f(x):
        calls.append(1)
        big.add_(x.sum())
        if next(count) == fails_at:
            raise ValueError("on purpose")
        return big * 1

    if fails_at == 2:  # while looking for what is saved: the answer, not an error
        assert "on purpose" in gt.measure(f, torch.ones(3)).notes[0]
    else:
        with pytest.raises(ValueError, match="on purpose"):
            gt.measure(f, torch.ones(3))
    assert calls == [] and not big.any()


# --- compiled code, other kinds of functions ------------------------------------------------


@pytest.mark.sweep_at("compile0")
@pytest.mark.parametrize("compiler", [torch.compile, gt.compile])
def test_compiled_code_is_counted_as_it_was_written(compiler):
    f = compiler(lambda x: torch.exp(x) @ x, backend="aot_eager")
    x = torch.randn(4, 4)
    f(x)
    found = gt.measure(f, x)
    assert (found.flops, found.saved_bytes) == (2 * 64 + 16, 64)
    assert "eager execution underneath torch.compile" in found.notes[0]
    inside = gt.measure(lambda x: 2 * f(x), x)
    assert inside.flops == 2 * 64 + 32 and inside.notes == found.notes


@pytest.mark.slow
def test_measure_imports_no_dynamo():
    import subprocess
    import sys

    program = (
        "import sys, torch, gradtools.torch as gt\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "gt.measure(torch.exp, torch.ones(3))\n"
        "print(before, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False False", done.stderr


def test_inside_of_torch_func_it_is_refused():
    with pytest.raises(gradtools.GradtoolsError, match="inside of a transform"):
        torch.func.grad(lambda x: x * gt.measure(torch.exp, x).flops)(torch.tensor(1.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_allocators_peak_is_told():
    found = gt.measure(lambda x: x.exp().exp(), torch.randn(1 << 20, device="cuda"))
    assert found.peak_bytes == 8 << 20
    assert found.device_peak_bytes == 8 << 20


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"num_layers": 2}, {"bidirectional": True}]
)
def test_the_kernel_of_an_lstm_counts_as_its_steps(options):
    lstm = torch.nn.LSTM(3, 4, **options)
    x = torch.randn(5, 2, 3)
    found = gt.measure(lambda x: lstm(x)[0].sum(), x)
    assert not found.notes
    with torch.backends.mkldnn.flags(enabled=False):
        assert found.flops == gt.measure(lambda x: lstm(x)[0].sum(), x).flops


@pytest.mark.sweep_at("{'bias': False}", "(5, 2, 3, 4)", "(7, 3, 5, 2)")
@pytest.mark.parametrize("sizes", [(5, 2, 3, 4), (7, 3, 5, 2), (1, 3, 5, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
def test_the_backward_kernel_of_an_lstm_counts_as_its_steps(options, sizes):
    steps, batch, wide, state = sizes
    lstm = torch.nn.LSTM(wide, state, **options)

    def gradients(*given):
        x, h, c = (t.clone().requires_grad_() for t in given)
        return torch.autograd.grad(lstm(x, (h, c))[0].sum(), [x, h, c, *lstm.parameters()])

    given = torch.randn(steps, batch, wide), *torch.randn(2, 1, batch, state)
    found = gt.measure(gradients, *given)
    assert not found.notes
    with torch.backends.mkldnn.flags(enabled=False):
        assert found.flops == gt.measure(gradients, *given).flops


FREE = {
    "views in place": lambda x: x.clone().transpose_(0, 1).unsqueeze_(0).squeeze_(0).t_(),
    "median": torch.nanmedian,
    "random integers": lambda x: torch.randint_like(x, 5),
    "unique": lambda x: torch.unique(x),
    "unique rows": lambda x: torch.unique(x, dim=0),
    "runs": lambda x: torch.unique_consecutive(x),
    "put": lambda x: x.put(torch.tensor([0, 3]), x[0, :2]),
    "scattered": lambda x: x.as_strided_scatter(x[0], (3,), (1,)),
}


@pytest.mark.quick_at("median")
@pytest.mark.parametrize("name", FREE)
def test_what_costs_nothing_is_not_noted_as_uncounted(name):
    found = gt.measure(FREE[name], torch.eye(3))
    assert (found.flops, found.notes) == (0, ())
