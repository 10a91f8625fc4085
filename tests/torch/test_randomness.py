"""The states of random streams are read, compared and put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gradtools.torch import state as randomness
from gradtools.torch.state import Randomness

seed_numpy, draw_numpy, set_numpy_state = np.random.seed, np.random.randn, np.random.set_state
DRAWS = {
    randomness.PYTHON: random.random,
    randomness.NUMPY: np.random.random,
    randomness.CPU: lambda: torch.rand(1),
}


def advanced(before):
    return before.advanced_to(before.current())


@pytest.mark.parametrize("stream", DRAWS)
def test_streams_that_were_drawn_from_are_kept(stream):
    before = Randomness.everywhere([])
    first = DRAWS[stream]()
    moved = advanced(before)
    assert [*moved.states] == [stream]
    moved.restore()
    assert DRAWS[stream]() == first


@pytest.mark.parametrize("stream", [randomness.PYTHON, randomness.NUMPY])
def test_a_number_that_a_stream_kept_back_counts_as_drawn(stream):
    draw = {randomness.PYTHON: lambda: random.gauss(0, 1), randomness.NUMPY: draw_numpy}[stream]
    draw()
    before = Randomness.everywhere([])
    draw()  # the number that was left over, which takes nothing more from the stream
    assert [*advanced(before).states] == [stream]
    assert before.current() is not before


def test_streams_are_read_again_once_something_is_drawn():
    first = Randomness.everywhere([])
    assert first.current() is first and not advanced(first).states
    for draw in (random.random, lambda: random.seed(1), lambda: random.gauss(0, 1), random.random):
        before = Randomness.everywhere([])
        draw()
        later = before.current()
        assert later is not before
        assert later.states[randomness.PYTHON][0] == random.getstate()
        before.restore()
        assert random.getstate() == before.states[randomness.PYTHON][0]


def test_a_state_that_is_read_twice_is_the_current_one():
    """NumPy's state is read from memory only if it has changed since the last time."""
    changes = (
        lambda: seed_numpy(3),
        draw_numpy,
        draw_numpy,  # the second number of a pair, which moves no words
        lambda: set_numpy_state(np.random.RandomState(4).get_state()),
        lambda: np.random.set_bit_generator(np.random.MT19937(5)),
    )
    generator = np.random.get_bit_generator()
    try:
        for change in changes:
            Randomness.everywhere([])
            change()
            before = Randomness.everywhere([])
            drawn = draw_numpy(3)
            before.restore()
            np.testing.assert_array_equal(draw_numpy(3), drawn)
    finally:
        np.random.set_bit_generator(generator)


def test_a_number_that_was_kept_back_is_put_back():
    draw_numpy()
    before = Randomness.everywhere([])
    second = draw_numpy()  # moves no words
    Randomness.everywhere([])
    before.restore()
    Randomness.everywhere([]).restore()
    assert draw_numpy() == second


def test_another_numpy_generator_is_read_as_well():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        known = Randomness.everywhere(())
        draw_numpy()
        assert randomness.NUMPY in advanced(known).states
    finally:
        np.random.set_bit_generator(before)
