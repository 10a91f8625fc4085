"""What of `replay_programs` does not hold today: the ways, and what was seen by the first of them.

Each is a strict xfail, so what is mended must be deleted here. Numbers are what gradtools gave, for
what the plain program gave, each with its place in the array.
"""

FAILS_TODAY: dict[str, str] = {
    "two towers share an encoder under autocast to torch.bfloat16, cache True": (
        "retain=0: process warnings: 13 for 12"
    ),
    "two towers, an island of full precision inside of f": (
        "verify: chunked: chunk 0 gives other numbers when it is computed again, first in"
    ),
    "f changes a keyword argument in place: a dictionary": (
        "retain=0 | retain=1 | retain=3 | verify | by four | checkpoint | frozen: "
        "loss: -1.631 for -1.7889"
    ),
    "f changes a keyword argument in place: a tensor in a dictionary, by another": (
        "retain=0 | retain=1 | retain=3 | verify | by four | checkpoint | frozen: "
        "loss: -1.631 for -1.7889"
    ),
    "f changes a shared argument in place: a NumPy array": ("frozen: loss: -1.7061 for -2.5324"),
    "a module keeps a list of attached outputs, and the loss reads them": (
        "retain=1 | retain=3 | by four: "
        "raises RuntimeError: Trying to backward through the graph a second time "
    ),
    "the loss reads the last attached penalty that a module keeps": (
        "retain=1 | retain=3 | by four: "
        "raises RuntimeError: Trying to backward through the graph a second time "
    ),
    "f counts in the result of functools.lru_cache": ("checkpoint: state more[1]: 1 for 0"),
    "a module counts in a frozen parameter of a ParameterList": (
        "retain=0 | retain=1 | retain=3 | verify | by four | checkpoint | frozen: "
        "the refusal says 'no module', which is false: chunked: f changes f.ps.0 "
    ),
    "a momentum encoder with a queue": (
        "retain=0 | retain=1 | retain=3 | verify | by four | checkpoint | frozen: "
        "the refusal says 'no module', which is false: chunked: f changes f.targe"
    ),
    "an embedding with max_norm": (
        "retain=0 | retain=1 | retain=3 | verify | by four | checkpoint: "
        "the refusal says 'no module', which is false: chunked: f changes f.weigh"
    ),
    "torch.utils.checkpoint inside of f around batch norm": (
        "retain=0 | retain=1 | verify | by four | checkpoint: "
        "state module buffers 2.running_mean: -0.13889 at 0 for -0.23981 at 0"
    ),
    "a chunk of weight 0 whose mean is 0/0": ("microbatched: value: nan for 1.5714"),
    "the first chunk has weight 0 and its mean is 0/0": ("microbatched: value: nan for 1.8571"),
    "weights that sum to 0": ("microbatched: value: nan for -inf"),
    "backward() through a frozen module at a plain z": (
        "frozen: raises RuntimeError: element 0 of tensors does not require grad and does"
    ),
    "f switches the default device, and computes by it": (
        "frozen: raises RuntimeError: trying to pop from empty mode stack"
    ),
    "another thread calls the same model while a chunk is computed again": (
        "by four | checkpoint: found[0]: 2 for 3"
    ),
    "another thread draws numbers while a chunk is computed again": (
        "by four | checkpoint: found[0]: 0.26983 at 1 for 0.48196 at 1"
    ),
    "f computes in a thread of its own": (
        "retain=0 | retain=1 | retain=3 | verify | by four | checkpoint | frozen: "
        "chunked: f captured 'a tensor' that is computed from others, or belongs "
    ),
    "a compiled module inside of f": ("retain=0: process distributions: False for True"),
    "an adapter that merges itself into the frozen layer for the call": (
        "frozen: grads[0]: -45.313 for -27.515"
    ),
}
