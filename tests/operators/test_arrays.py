"""Arrays, random keys and the array-API namespace behave the same in both backends."""

import importlib

import numpy as np
import pytest

from gradtools import GradtoolsError

ml_dtypes = pytest.importorskip("ml_dtypes")


pytestmark = pytest.mark.usefixtures("default_precision")


@pytest.fixture(params=["torch", "jax"])
def arrays(request):
    pytest.importorskip(request.param)
    return importlib.import_module(f"gradtools.{request.param}.arrays")


@pytest.fixture
def torch_arrays():
    pytest.importorskip("torch")
    return importlib.import_module("gradtools.torch.arrays")


@pytest.fixture
def jax_arrays():
    pytest.importorskip("jax")
    return importlib.import_module("gradtools.jax.arrays")


HELD_BY_BOTH = [
    np.float32,
    np.float16,
    np.complex64,
    np.int32,
    np.int8,
    np.uint8,
    np.uint16,
    np.bool_,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", HELD_BY_BOTH, ids=lambda d: np.dtype(d).name)
def test_numpy_arrays_come_back_with_their_dtype_and_values(arrays, dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    back = arrays.to_numpy(arrays.asarray(x))
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


def test_a_zero_without_memory_is_read(torch_arrays):
    torch = pytest.importorskip("torch")
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    (g,) = torch.autograd.grad(x.abs().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert h._is_zerotensor()
    assert torch_arrays.to_numpy(h).tolist() == [0.0, 0.0]


def test_reversed_byte_swapped_and_read_only_arrays_are_taken(arrays):
    x = np.arange(6).astype(">f4")[::-2]
    x.flags.writeable = False
    back = arrays.to_numpy(arrays.asarray(x))
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, [5, 3, 1])


def test_asarray_shares_no_memory_with_its_argument(arrays):
    x = np.zeros(1024, np.float32)
    y = arrays.asarray(x)
    x[:] = 1
    assert arrays.to_numpy(y).sum() == 0


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128", "uint64"])
def test_jax_without_x64_refuses_wide_dtypes_and_names_the_mend(jax_arrays, dtype):
    with pytest.raises(GradtoolsError, match=rf"{dtype} .*jax_enable_x64.*astype\(np\."):
        jax_arrays.asarray(np.ones(3, dtype))


def test_torch_keeps_float64(torch_arrays):
    import torch

    assert torch_arrays.asarray(np.ones(3)).dtype == torch.float64
    assert torch_arrays.asarray(np.float64(1)).dtype == torch.float64


def test_torch_views_that_numpy_has_no_word_for_are_resolved(torch_arrays):
    import torch

    z = torch.tensor([1 + 2j], requires_grad=True)
    np.testing.assert_array_equal(torch_arrays.to_numpy(z.conj()), [1 - 2j])
    np.testing.assert_array_equal(torch_arrays.to_numpy(z.conj().imag), [-2])


def test_a_key_is_a_function_of_its_seed(arrays):
    words = {
        seed: tuple(arrays.to_numpy(arrays.random_key(seed))) for seed in (0, 1, -1, 2**31 - 1)
    }
    assert words[0] == tuple(arrays.to_numpy(arrays.random_key(0)))
    assert len(set(words.values())) == 4


def test_jax_without_x64_refuses_a_seed_that_it_would_cut(jax_arrays):
    import jax

    for seed in (2**31, 2**32, -(2**31) - 1):
        with pytest.raises(GradtoolsError, match="32 bits"):
            jax_arrays.random_key(seed)
    with jax.enable_x64(True):
        big, zero = (jax_arrays.to_numpy(jax_arrays.random_key(s)) for s in (2**32, 0))
    assert big.tolist() != zero.tolist()


@pytest.mark.slow_at("jax")
def test_children_of_keys_never_collide(arrays):
    children = arrays.split_key(arrays.random_key(7), 100_000)
    assert len(np.unique(arrays.to_numpy(children), axis=0)) == 100_000


def test_every_bit_of_torch_keys_is_balanced_and_neighbours_do_not_correlate(torch_arrays):
    import torch

    children = torch_arrays.split_key(torch_arrays.random_key(0), 20_000)
    bits = ((children[:, :, None] >> torch.arange(64)) & 1).double().reshape(20_000, 128) - 0.5
    assert bits.mean(0).abs().max() < 0.02
    assert (bits[1:] * bits[:-1]).mean(0).abs().max() < 0.01
    assert (bits.T @ bits / 20_000 - torch.eye(128) / 4).abs().max() < 0.01


def test_splitting_under_vmap_is_splitting_one_by_one(torch_arrays):
    import torch

    keys = torch_arrays.split_key(torch_arrays.random_key(0), 5)
    mapped = torch.func.vmap(lambda k: torch_arrays.split_key(k, 3))(keys)
    assert torch.equal(mapped, torch.stack([torch_arrays.split_key(k, 3) for k in keys]))


def test_a_torch_child_alone_is_the_one_among_its_siblings(torch_arrays):
    key = torch_arrays.random_key(7)
    children = [torch_arrays.fold_in("chunked", key, i).tolist() for i in range(3)]
    assert children == torch_arrays.split_key(key, 3).tolist()
