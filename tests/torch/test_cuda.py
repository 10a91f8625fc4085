"""What can only be seen on a GPU: it runs wherever PyTorch has one.

    python -m pytest tests/torch/test_cuda.py -rs

What needs no GPU to be seen is in test_other_device.py.
"""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA device here")
    return torch.device("cuda")


EDITS = {
    "chunked": lambda f: gt.chunked(f, 2),
    "checkpoint": gt.checkpoint,
    "frozen": gt.frozen,
}


def noisy(x):
    return torch.nn.functional.dropout(torch.sin(x), 0.5) * torch.rand_like(x)


@pytest.mark.parametrize("name", EDITS)
def test_what_is_drawn_on_the_device_is_drawn_again(cuda, name):
    x = torch.randn(4, device=cuda)
    found = []
    for f in (EDITS[name](noisy), noisy):
        torch.manual_seed(3)
        found.append(gt.grad(lambda x, f=f: f(x[:2]).sum())(x))
        found.append(torch.rand(2, device=cuda))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3]), "the stream goes on elsewhere"


@pytest.mark.parametrize("name", ["chunked", "checkpoint"])  # `frozen` has no parameters
def test_a_scaled_step_in_half_precision_is_that_of_plain_code(cuda, name):
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    net, x = net.to(cuda), torch.randn(4, 8, device=cuda)
    found = []
    for f in (EDITS[name](net), net):
        net.zero_grad()
        scaler = torch.amp.GradScaler(cuda.type)
        with torch.autocast(cuda.type, torch.float16):
            loss = f(x).float().square().mean()
        scaler.scale(loss).backward()
        found.append([p.grad.clone() / scaler.get_scale() for p in net.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=8e-3, atol=1e-4)


def test_second_order_through_fused_attention_is_that_of_the_plain_one(cuda):
    xs = tuple(torch.randn(2, 2, 5, 8, device=cuda) for _ in range(3))
    loss = lambda *xs: torch.nn.functional.scaled_dot_product_attention(*xs).square().sum()
    found = gt.hvp(loss, xs, xs)[1]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = gt.hvp(loss, xs, xs, mode="reverse_over_reverse")[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_gradient_on_a_side_stream_is_that_of_the_default_one(cuda):
    x = torch.randn(1 << 20, device=cuda)
    gradient = gt.grad(lambda x: gt.chunked(torch.sin, 1 << 18)(x).sum())
    expected, side = gradient(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = gradient(x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, expected)


def test_the_peak_of_chunked_is_that_of_a_chunk(cuda):
    """By the allocator's own counter: eight functions of 2^20 numbers, in eight chunks."""
    x = torch.randn(1 << 20, device=cuda)
    deep = lambda x: x.sin().exp().sin().exp().sin().exp().sin().exp()
    plain, chunked = (
        gt.measure(gt.grad(lambda x, f=f: f(x).sum()), x).device_peak_bytes
        for f in (deep, gt.chunked(deep, 1 << 17))
    )
    assert chunked < 0.75 * plain


def test_a_gradient_is_captured_in_a_graph(cuda):
    x = torch.randn(64, device=cuda)
    gradient = gt.grad(lambda x: gt.reverse_gradient(x.sin()).sum())
    for _ in range(3):
        gradient(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient(x)
    x.fill_(0.0)
    graph.replay()
    assert torch.equal(found, -torch.ones_like(x))
