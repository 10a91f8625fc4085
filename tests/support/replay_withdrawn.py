"""Programs of the table whose state `chunked`, `checkpoint` and `frozen` do not put back.

What a recomputation puts back is named in `gradtools/torch/state.py`: random streams, autocast and
buffers. These programs keep state elsewhere. `tests/torch/test_replay_programs.py` reads the sets.
"""

COMPARED = frozenset(
    {
        "a module keeps a detached mean for its next call",
        "f counts in a list",
        "f counts in a dictionary",
        "f counts in a variable of a closure",
        "f counts in a set",
        "f counts in a deque with a length",
        "f counts in a Counter",
        "f counts in the order of an OrderedDict",
        "f counts in a NumPy array",
        "f counts in a random.Random",
        "f counts in a NumPy Generator",
        "f counts in a NumPy RandomState",
        "f counts in a global",
        "f counts in a list in a global",
        "f counts in a bound method of a plain object",
        "f counts in a mutable default of a function",
        "f counts in a dataclass",
        "f counts in a list inside of a named tuple",
        "f counts in a tensor that shares memory with an array",
        "a module counts in what its first call sets up",
        "a module counts in a buffer that its first call registers",
        "a module counts in an attribute of a module in it",
        "a forward hook counts and multiplies",
        "between forward and backward the module is put to evaluation",
        "between forward and backward a hook is added",
        "between forward and backward dropout's p is changed",
        "a parameter that only the second chunk uses",
        "f deletes an attribute that the next call makes anew",
        "f gives only the rows that it chooses, of some chunks none",
        "a weight is tied anew in each forward pass",
        "a hook swaps the layers of a list before each call",
        "stochastic depth by NumPy",
        "stochastic depth by a random.Random of a class of its own",
        "stochastic depth by a seed that counts",
        "a module that hands on what it does not have to one that counts",
        "a ragged batch that is packed, through a GRU that keeps its state",
    }
)
"""Right, or refused: the comparison with the first pass finds the difference."""

FROZEN_UNGUARDED = frozenset(
    {
        "an adapter that merges itself into the frozen layer for the call",
        "a tensor of a class that counts the functions called on it",
    }
)
"""G changes state and puts it back: `frozen` pushes another function than it pulls. Not run."""

AS_CHECKPOINT = frozenset(
    {
        "parametrize.cached() around",
        "parametrize.cached() around, backward inside",
        "saved tensors' hooks inside of f count",
        "between forward and backward the parameters are changed in place under no_grad",
        "between forward and backward a captured list is changed",
        "between forward and backward the batch is changed in place",
        "an embedding with max_norm",
        "torch.utils.checkpoint inside of f, reentrant True",
        "f calls backward() itself, into .grad of a leaf of its own",
        "f raises ValueError at call 1",
        "f raises ValueError at call 2",
        "f raises ValueError at call 3",
        "f raises ValueError at call 5",
        "f raises KeyboardInterrupt at call 1",
        "f raises KeyboardInterrupt at call 2",
        "f raises KeyboardInterrupt at call 3",
        "f raises KeyboardInterrupt at call 5",
        "the backward pass runs in another thread",
        "a chunk computed again has the same values and a part of the graph less",
        "state out of reach counts only in training, after a step in evaluation",
        "state out of reach counts only for batches of another shape",
        "the code of a function is replaced between two steps, as a reload does",
    }
)
"""As with `torch.utils.checkpoint`: effects happen twice, or PyTorch raises; not run."""
