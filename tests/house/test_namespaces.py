"""Both namespaces have the same API: names, signatures and documentation."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pathlib
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import gradtools
import gradtools.api

INSTALLED = gradtools.available_backends()
ROOT = pathlib.Path(gradtools.__file__).parent
NAMES = {
    "derivatives": [
        *("grad", "value_and_grad", "vjp", "jvp", "linearize", "jacobian", "hvp", "hessian"),
        *("per_example_grad", "mixed_partial", "minimax_value_and_grad"),
        *("retain_gradient", "retained_gradients", "implicit_solution"),
        *("vmap", "checkpoint", "compile"),
    ],
    "edits": [
        *("reverse_gradient", "scale_gradient", "stop_gradient", "clip_gradient"),
        *("transform_gradient", "replace_gradient", "straight_through"),
    ],
    "own rules": ["custom_rule", "host_function", "ArraySpec"],
    "memory": [
        *("frozen", "chunked", "microbatched_value_and_grad", "all_gather", "is_recomputing"),
        *("GradientAccumulator", "accumulate_gradients", "assign_gradients"),
    ],
    "models": ["make_functional", "xp", "asarray", "to_numpy", "random_key", "split_key"],
    "seeing": [
        *("why_zero", "gradient_graph", "formula"),
    ],
}
ALL = [name for names in NAMES.values() for name in names]
FUNCTIONS = [name for name in ALL if name != "xp"]


def namespace(backend):
    return importlib.import_module(f"gradtools.{backend}")


def test_a_namespace_exports_exactly_the_names_of_the_design(gt):
    assert sorted(gt.__all__) == sorted(ALL)
    assert all(hasattr(gt, name) for name in gt.__all__)
    assert dir(gt) == sorted(gt.__all__)


def test_the_stub_names_what_a_namespace_exports():
    tree = ast.parse((ROOT / "public.pyi").read_text())
    named = [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]
    assert sorted(named) == sorted(FUNCTIONS)


@pytest.mark.skipif(len(INSTALLED) < 2, reason="needs both frameworks")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_namespaces_have_the_same_signature(name):
    one, other = (getattr(namespace(b), name) for b in INSTALLED)
    assert inspect.signature(one) == inspect.signature(other)
    assert inspect.getdoc(one) == inspect.getdoc(other)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_name_is_documented_with_an_example(gt, name):
    text = inspect.getdoc(getattr(gt, name))
    assert text, "no docstring"
    assert "Example:" in text and ">>>" in text
    assert text.splitlines()[0].endswith((".", ":")) and len(text.splitlines()[0]) <= 100
    parameters = inspect.signature(getattr(gt, name)).parameters
    for parameter in parameters:
        assert f"{parameter}:" in text or f"{parameter}`" in text, f"{parameter} is not documented"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_name_has_type_annotations(gt, name):
    signature = inspect.signature(getattr(gt, name))
    empty = inspect.Parameter.empty
    assert [p.name for p in signature.parameters.values() if p.annotation is empty] == []
    if inspect.isroutine(getattr(gt, name)):
        assert signature.return_annotation is not inspect.Signature.empty


EXAMPLES = """
    import doctest, inspect, sys
    import numpy as np
    import gradtools.{backend} as gt

    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for name in {names!r}:
        found = getattr(gt, name)
        members = [found]
        if inspect.isclass(found):
            members += [m for n, m in vars(found).items() if callable(m) and not n.startswith("_")]
        for member in members:
            text = inspect.getdoc(member) or ""
            test = parser.get_doctest(text, {{"gt": gt, "np": np}}, name, None, 0)
            runner.run(test)
    print(runner.failures, runner.tries, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_the_examples_of_every_public_name_run_as_they_stand(backend):
    """The docstring examples run in a fresh process with x64 disabled, which is JAX's default."""
    source = textwrap.dedent(EXAMPLES.format(backend=backend, names=FUNCTIONS))
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    failures, tries = map(int, done.stderr.strip().splitlines()[-1].split())
    assert failures == 0, done.stdout
    assert tries >= 2 * len(FUNCTIONS)


def test_the_examples_of_gradtools_itself_run():
    assert doctest.testmod(gradtools).failed == 0


@pytest.mark.parametrize("backend", INSTALLED)
def test_an_editor_completes_public_names_alone(backend):
    gt = namespace(backend)
    layers = {"torch": {"nn"}, "jax": {"equinox", "linen", "nnx"}}[backend]
    assert {*dir(gt)} == {*gt.__all__}
    assert all(hasattr(getattr(gt, name), "GradientReversal") for name in layers)
    assert {*dir(gradtools)} - {"__version__"} == {*gradtools.__all__} | {
        "bridge", "jax", "testing", "torch"
    }  # fmt: skip


# Files and folders that exist in only one backend, with the reason.
ALONE = dict(
    line.split(": ", 1)
    for line in """
seeing/torch/recording/: recorders of eager runs; JAX traces a jaxpr
jax/rules/primitives.py: the primitives of a rule in a jaxpr; PyTorch has one Function per rule
jax/rules/linearizing.py: traced jvp and vjp maps of a rule; PyTorch calls the maps in eager code
jax/jaxprs.py: evaluation of jaxprs; PyTorch has no jaxprs
torch/rules/functions.py: the autograd Function of a rule; JAX has primitives
torch/rules/signatures.py: caches for repeated calls of a rule; JAX traces each call
torch/functorch_wrappers.py: tensors wrapped by torch.func; JAX has tracers
torch/compiling.py: settings for dynamo; `jax.jit` needs none
seeing/torch/_upstream.py: private names for the recorders; JAX has one file for private names
seeing/torch/undo.py: the side effects of a run are undone; JAX functions are pure
seeing/torch/thread_patches.py: patches of calls that modes do not intercept; JAX traces all calls
seeing/torch/live_graph.py: the autograd graph of existing tensors; JAX arrays have no graph
torch/nn.py: the reversal layer for torch.nn
jax/linen.py: the reversal layer for flax.linen
torch/modes.py: thread-local modes; JAX has none
torch/operation_marks.py: marks of internal operations; in JAX the name of a jaxpr identifies them
torch/edits.py: the autograd node of an edit; in JAX all edits are in `rules/installing.py`
torch/state.py: random streams and buffers that change; JAX functions are pure
torch/captured_tensors.py: tensors that a recomputed function captures; JAX converts closures
torch/recomputation.py: recomputed functions; in JAX `recomputing.py`
torch/gradient_tensors.py: detached results and zeros; JAX arrays have no graph
torch/function_modes.py: a choice of kernels by function modes; JAX has no fused kernels to replace
torch/normalization.py: normalization by elementary operations; JAX has no fused normalization
torch/many_tangents.py: one pass for each tangent; JAX uses `vmap`
torch/autograd_graph.py: a traversal of the autograd graph; JAX has a jaxpr
torch/transformed_modules.py: modules that operators return; in JAX in `module_arguments`
torch/frozen_constants.py: the node of constants; JAX differentiates programs
torch/lazy_graphs.py: graphs that a backward pass builds; JAX differentiates programs
jax/compiled_once.py: a cache of compiled eager programs; PyTorch compiles none
jax/shardings.py: meshes with Explicit axes; PyTorch has processes
jax/recomputing.py: recomputed functions; in PyTorch `recomputation.py`
jax/nnx.py: the reversal layer for flax.nnx
jax/equinox.py: the reversal layer for equinox
seeing/jax/graphs.py: conversion of a jaxpr to a graph; PyTorch records the graph at run time
seeing/jax/source_lines.py: the source line of an equation; the recorders of PyTorch store the line
jax/slicing.py: slices of arrays that may be sharded; in PyTorch in `chunking`
seeing/jax/tracing.py: traces of programs with branches on values; PyTorch runs the branches
seeing/jax/unrolling.py: loops and branches of a jaxpr at given values; PyTorch runs them
jax/reachability.py: reachability in the jaxpr; PyTorch has the autograd graph
""".strip().splitlines()
)


def test_the_wings_hold_files_of_the_same_names():
    files = {
        wing: {p.relative_to(ROOT / wing).as_posix() for p in (ROOT / wing).rglob("*.py")}
        for wing in ("torch", "jax", "seeing/torch", "seeing/jax")
    }
    pairs = (("torch", "jax"), ("seeing/torch", "seeing/jax"))
    alone = {
        f"{wing}/{name}"
        for pair in pairs
        for wing, twin in (pair, pair[::-1])
        for name in files[wing] - files[twin]
    }
    folders = tuple(name for name in ALONE if name.endswith("/"))
    assert {name for name in alone if not name.startswith(folders)} == {*ALONE} - {*folders}
    assert all(any(name.startswith(folder) for name in alone) for folder in folders)


def test_nothing_above_the_wings_imports_a_framework():
    for path in (*ROOT.glob("*.py"), *(ROOT / "arguments").glob("*.py")):
        for line in path.read_text().splitlines():
            words = line.split()
            if line.startswith(("import ", "from ")):
                assert words[1].split(".")[0] not in ("torch", "jax", "flax"), path
                assert not words[1].startswith(("gradtools.torch", "gradtools.jax")), path


@pytest.mark.parametrize("wing", ["torch", "jax"])
def test_no_file_of_a_wing_names_its_twin(wing):
    other = {"torch": ("jax", "flax"), "jax": ("torch",)}[wing]
    for path in (ROOT / wing).glob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].split(".")[0] not in other, path
                assert not words[1].startswith(f"gradtools.{other[0]}"), path


# Classes of modules that differ by library, because each derives from its library's base class.
PER_LIBRARY = {"GradientReversal", "Transformed"}


@pytest.mark.slow
def test_a_class_has_its_name_to_itself_or_shares_it_with_its_twin_in_the_other_wing():
    homes: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in PER_LIBRARY:
                homes.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    shared = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    wings = [
        [file.removeprefix("seeing/").partition("/")[0] for file in files]
        for files in shared.values()
    ]
    assert all(wing == ["jax", "torch"] for wing in wings), shared


def made_of(gt):
    def loss(w, x):
        """Squared error."""
        return ((w * x) ** 2).sum()

    a = gt.asarray(np.ones(2, np.float32))
    full = gt.GradientAccumulator()
    full.add({"w": a}, weight=3)
    of = "with respect to argument 0."
    return {
        gt.grad(loss): ("<grad(loss), called with (w, x)>", f"Gradient of loss {of}"),
        gt.jacobian(loss): ("<jacobian(loss), called with (w, x)>", f"Jacobian of loss {of}"),
        gt.value_and_grad(loss, (0, 1)): (
            "<value_and_grad(loss), called with (w, x)>",
            "Value and gradient of loss with respect to arguments 0, 1.",
        ),
        gt.chunked(loss, 2): (
            "<chunked_loss, called with (w, x)>",
            "loss, applied to a batch in chunks.",
        ),
        gt.checkpoint(loss): ("<checkpointed_loss, called with (w, x)>", "loss, recomputed"),
        gt.frozen(loss): ("<frozen_loss, called with (w, x)>", "loss, with constant parameters."),
        gt.custom_rule(loss): ("<custom_rule loss, rules: none>", "Squared error."),
        full: ("<GradientAccumulator, weight 3, float32[2]>", "A running weighted sum"),
        gt.GradientAccumulator(): ("<GradientAccumulator, empty>", "A running weighted sum"),
        gt.vjp(lambda x: x**2, a)[1]: (
            "<pullback: Maps a cotangent of the output",
            "Maps a cotangent",
        ),
        gt.linearize(lambda x: x, a)[1]: ("<pushforward: Maps one tangent for each", "Maps one"),
        gt.straight_through(loss): (
            "<straight_through loss, derivative",
            "Computes the value of loss,",
        ),
    }


def test_what_an_operator_returns_prints_its_name_its_signature_and_what_it_computes(gt):
    for made, (printed, doc) in made_of(gt).items():
        assert repr(made).startswith(printed)
        assert inspect.getdoc(made).startswith(doc)
        assert not type(made).__name__.startswith("_")
    assert inspect.getdoc(gt.grad(made_of)).startswith("Gradient of made_of")
    assert "Squared error." in inspect.getdoc(next(iter(made_of(gt))))


def test_pythons_errors_name_a_public_class_for_a_function_that_was_not_called(gt):
    def loss(w):
        return (w**2).sum()

    with pytest.raises(TypeError, match="'float' and 'TransformedFunction'"):
        0.1 * gt.grad(loss)
    with pytest.raises(TypeError, match="cannot unpack non-iterable TransformedFunction object"):
        _, _ = gt.value_and_grad(loss)


def test_a_refusal_is_shown_as_a_gradtools_error_and_can_be_pickled(gt):
    with pytest.raises(TypeError) as caught:
        gt.grad(lambda x: x, argnum=0)
    assert type(caught.value).__qualname__ == "GradtoolsError"
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value)
