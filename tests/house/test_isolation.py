"""What an import brings in, seen in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from functools import cache

import pytest

import gradtools

INSTALLED = gradtools.available_backends()


def run(program: str, without: tuple[str, ...] = ()) -> str:
    """What the program prints in a fresh interpreter in which some packages do not exist."""
    hook = f"""
        import importlib.machinery

        class Absent(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name.split(".")[0] in {without!r}:
                    return None
                return super().find_spec(name, path, target)

        import sys
        sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Absent
    """
    source = textwrap.dedent(hook) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def needs(*backends: str) -> pytest.MarkDecorator:
    missing = [b for b in backends if b not in INSTALLED]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


def test_importing_gradtools_imports_no_framework():
    program = """
        import gradtools, sys
        gradtools.available_backends()
        loaded = {name.split(".")[0] for name in sys.modules}
        print(sorted(loaded & {"torch", "jax", "jaxlib", "numpy", "flax", "array_api_compat"}))
    """
    assert run(program) == "[]"


# --- what is seen in one fresh process that imports a framework, then its wing


TORCH = """
    import json, sys, torch
    has = lambda *names: sorted({n for n in sys.modules if n.split(".")[0] in names})
    defaults = lambda: (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    found = {"dynamo after torch": "torch._dynamo" in sys.modules}
    state, before = torch.get_rng_state(), defaults()

    import gradtools.torch as gt
    found["the twin"] = has("jax", "jaxlib") + [n for n in sys.modules if "gradtools.jax" in n]
    found["defaults are kept"] = before == defaults()
    found["no number was drawn"] = torch.equal(state, torch.get_rng_state())
    found["array_api_compat"] = bool(has("array_api_compat"))
    gt.xp
    found["array_api_compat after xp"] = bool(has("array_api_compat"))

    import numpy as np
    gt.grad(lambda x: gt.reverse_gradient(x) ** 2)(gt.asarray(np.float32(2.0)))
    found["dynamo after a gradient"] = "torch._dynamo" in sys.modules
    print(json.dumps(found))
"""
JAX = """
    import json, sys, jax
    from jax._src import xla_bridge
    has = lambda *names: sorted({n for n in sys.modules if n.split(".")[0] in names})
    before, found = dict(jax.config.values), {}

    import gradtools.jax
    found["the twin"] = has("torch") + [n for n in sys.modules if "gradtools.torch" in n]
    found["libraries of modules"] = has("flax", "optax", "equinox")
    found["a device is started"] = xla_bridge.backends_are_initialized()
    found["settings are kept"] = dict(jax.config.values) == before
    found["floats"] = str(jax.numpy.ones(2).dtype)
    print(json.dumps(found))
"""


@cache
def seen(backend: str) -> dict[str, object]:
    """What that process prints; asked for once."""
    return json.loads(run({"torch": TORCH, "jax": JAX}[backend]))


@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_wing_never_imports_its_twin(backend):
    assert seen(backend)["the twin"] == []


@pytest.mark.slow
@needs("torch")
def test_importing_the_torch_wing_does_not_import_dynamo_which_is_slow():
    found = seen("torch")
    assert not found["dynamo after torch"] and not found["dynamo after a gradient"]


@needs("torch")
def test_array_api_compat_is_imported_when_xp_is_asked_for():
    found = seen("torch")
    assert (found["array_api_compat"], found["array_api_compat after xp"]) == (False, True)


@needs("jax")
def test_importing_the_jax_wing_switches_nothing_in_jax():
    found = seen("jax")
    assert (found["settings are kept"], found["floats"]) == (True, "float32")


@needs("jax")
def test_importing_the_jax_wing_imports_no_library_of_modules_and_starts_no_device():
    found = seen("jax")
    assert (found["libraries of modules"], found["a device is started"]) == ([], False)


@needs("torch")
def test_importing_the_torch_wing_changes_no_default_and_draws_no_random_number():
    found = seen("torch")
    assert found["defaults are kept"] and found["no number was drawn"]


# --- processes of their own


WORK = """
    import numpy as np
    import gradtools
    import gradtools.{backend} as gt

    assert gradtools.available_backends() == ("{backend}",), gradtools.available_backends()
    x = gt.asarray(np.float32([1.0, 2.0]))
    f = lambda x: (gt.clip_gradient(gt.reverse_gradient(x, 0.5), max_norm=100.0) ** 2).sum()
    print(gt.to_numpy(gt.grad(f)(x)).tolist(), gt.to_numpy(gt.hessian(f)(x)).tolist())
"""


@pytest.mark.slow
@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_wing_works_where_the_other_framework_does_not_exist(backend):
    without = {
        "torch": ("jax", "jaxlib", "flax", "optax", "equinox"),
        "jax": ("torch", "array_api_compat", "flax", "optax", "equinox"),
    }[backend]
    assert run(WORK.format(backend=backend), without) == "[-1.0, -2.0] [[0.5, -0.0], [-0.0, 0.5]]"


@needs("jax")
def test_make_functional_says_what_it_takes_where_no_library_of_modules_exists():
    program = """
        import gradtools.jax as gt
        from gradtools import GradtoolsError
        try:
            gt.make_functional(object())
        except GradtoolsError as error:
            print(str(error).startswith("make_functional"))
    """
    assert run(program, ("torch", "flax", "optax", "equinox")) == "True"


@pytest.mark.slow_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_wing_without_its_framework_says_which_import_failed(backend):
    program = f"""
        try:
            import gradtools.{backend}
        except ImportError as error:
            print(error.name)
    """
    assert run(program, (backend,)) == backend


@pytest.mark.slow
@needs("torch", "jax")
def test_both_wings_work_in_one_process():
    program = """
        import numpy as np
        import gradtools.torch, gradtools.jax
        for gt in (gradtools.torch, gradtools.jax):
            print(float(gt.grad(lambda x: gt.reverse_gradient(x) ** 2)(gt.asarray(np.float32(3)))))
    """
    assert run(program) == "-6.0\n-6.0"


@pytest.mark.slow_at("jax-JAX")
@pytest.mark.parametrize(("backend", "title"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_a_wing_without_its_framework_says_what_to_install(backend: str, title: str) -> None:
    program = f"""
        try:
            import gradtools.{backend}
        except ModuleNotFoundError as error:
            print(error, error.name)
    """
    said = run(program, without=(backend, "jaxlib"))
    assert said == (
        f"gradtools.{backend} needs {title}, which is not installed. Fix: "
        f'pip install "gradtools[{backend}]". {backend}'
    )


@pytest.mark.slow_at(
    "from gradtools.testing import check_derivatives as c; c(abs, (1.0,), backend='torch')"
)
@needs("torch", "jax")
@pytest.mark.parametrize(
    "program",
    [
        "import gradtools.bridge",
        "from gradtools.testing import check_derivatives as c; c(abs, (1.0,), backend='torch')",
    ],
)
def test_what_needs_an_absent_framework_says_what_to_install(program: str) -> None:
    tried = f"""
        try:
            {program}
        except ModuleNotFoundError as error:
            print(error)
    """
    said = run(tried, without=("torch",))
    assert said.endswith(
        'needs PyTorch, which is not installed. Fix: pip install "gradtools[torch]".'
    )


def test_an_operator_looked_for_in_gradtools_itself_is_told_where_it_stands() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'grad'\. .* import gradtools\.torch"):
        gradtools.grad  # noqa: B018 - the look is what is tested


@pytest.mark.slow
@needs("torch")
def test_a_first_call_of_a_rule_does_not_import_the_compiler() -> None:
    program = """
        import sys, torch
        import gradtools.torch as gt
        f = gt.custom_rule(lambda x: x * x)
        f.defvjp(lambda x: (x * x, x), lambda x, c: (2 * x * c,))
        f(torch.ones(3, requires_grad=True)).sum().backward()
        gt.grad(lambda x: f(x).sum())(torch.ones(3))
        print(sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
    """
    assert run(program) == "[]"


# --- what a bare import loads ------------------------------------------------------------------

LOADED = """
    import sys
    before = set(sys.modules)
    import {framework}
    theirs = set(sys.modules)
    import gradtools.{backend} as gt
    print(*sorted(set(sys.modules) - theirs))
"""
FRAMEWORK = {"torch": "torch", "jax": "jax, jax.numpy, jax.extend.core"}
# Rooms of which most programs need nothing.
ASKED_FOR = (
    *("seeing", "testing", "cli", "display", "keras_layers"),
    *("accumulate", "chunking", "custom", "frozen", "kernels", "models", "measures", "modules"),
)


COMPILED_FIRST = """
    import torch
    import gradtools.torch as gt
    x = torch.ones(3)
    f = lambda y: gt.mixed_partial(lambda y, g: (y**3 * g).sum(), lambda z: z**2, y, x, x)
    print(torch.compile(f, fullgraph=True, backend="eager")(x).tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif("torch" not in INSTALLED, reason="of dynamo, which traces no import")
def test_the_first_mixed_partial_of_a_process_may_be_compiled_whole():
    assert run(COMPILED_FIRST).strip() == "[6.0, 6.0, 6.0]"


@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_bare_import_loads_few_rooms_and_none_that_are_asked_for(backend):
    loaded = run(LOADED.format(framework=FRAMEWORK[backend], backend=backend)).split()
    ours = [name for name in loaded if name.split(".")[0] == "gradtools"]
    assert len(ours) < 50
    assert [n for n in ours if set(n.split(".")) & set(ASKED_FOR)] == []
    costly = ("numpy", "html", "statistics", "inspect")
    assert [n for n in loaded if n.split(".")[0] in costly] == []


MISSION = """
    import sys
    import numpy as np
    import gradtools.{backend} as gt

    x = gt.asarray(np.float32([1.0, 2.0, 3.0, 4.0]))
    total, cube = gt.xp.sum, lambda x: x**3
    loss = lambda x: total(x**3)
    gt.grad(loss)(x), gt.value_and_grad(loss)(x), gt.hessian(loss)(x), gt.jacobian(cube)(x)
    gt.vjp(cube, x)[1](x), gt.jvp(cube, (x,), (x,)), gt.linearize(cube, x)[1](x)
    gt.hvp(loss, (x,), (x,)), gt.jvp(gt.grad(loss), (x,), (x,))
    gt.per_example_grad(lambda w, x: w[0] * x)(x, x)
    gt.minimax_value_and_grad(lambda x, y: total(x * y), 0, 1)(x, x)
    gt.mixed_partial(lambda y, g: total(y * g**2), cube, x, x, x)
    for f in (gt.chunked(cube, 2), gt.frozen(cube), gt.checkpoint(cube)):
        g = lambda x: total(f(x) ** 2)
        gt.grad(lambda x: total(gt.grad(g)(x) ** 2))(x)
    gt.microbatched_value_and_grad(lambda w, x: total(w * x) / len(x), 2)(x[0], x)
    edit = gt.straight_through(gt.xp.round)
    edits = lambda x: gt.replace_gradient(gt.clip_gradient(gt.reverse_gradient(x), 1.0), x)
    gt.grad(lambda x: total(gt.scale_gradient(gt.stop_gradient(x) * edit(edits(x)), 2.0)))(x)
    rule = gt.custom_rule(lambda x: x * x)
    rule.defvjp(lambda x: (x * x, x), lambda x, c: (2 * x * c,))
    host = gt.host_function(np.square)
    host.defvjp(lambda x: (host(x), x), lambda x, c: (2 * x * c,))
    for f in (rule, host):
        gt.grad(lambda x: total(gt.grad(lambda x: total(f(x)))(x) ** 2))(x)
    held = gt.GradientAccumulator()
    held.add(gt.grad(loss)(x))
    held.mean()
    print(sorted(name for name in sys.modules if name.startswith("gradtools.seeing")))
"""


OF_MODULES = """
    import sys
    import torch
    import gradtools.torch as gt

    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    grads = gt.grad(lambda m, x: m(x).tanh().sum())(model, x)
    sum((g**2).sum() for g in grads.values()).backward()
    gt.checkpoint(model)(x).sum().backward()
    gt.make_functional(model)
    print(sorted(name for name in sys.modules if name.startswith("gradtools.seeing")))
"""


@pytest.mark.slow
@needs("torch")
def test_derivatives_at_modules_import_nothing_of_seeing():
    assert run(OF_MODULES) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("backend", INSTALLED)
def test_derivatives_edits_rules_and_chunks_import_nothing_of_seeing(backend):
    assert run(MISSION.format(backend=backend)) == "[]"


DRAWN = """
    import numpy as np
    import gradtools
    import gradtools.{backend} as gt
    graph = gt.gradient_graph(gt.xp.exp, gt.asarray(np.ones(3, np.float32)), order=2)
    drawn = str(graph), graph.to_html(), graph._repr_html_(), graph.to_mermaid(), graph.to_dot()
    assert all("exp" in form for form in drawn) and not hasattr(graph, "_repr_svg_")
    try:
        graph.to_svg()
    except gradtools.GradtoolsError as error:
        print(error)
"""


@pytest.mark.slow_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_graphs_are_drawn_without_the_extra_and_a_picture_in_a_file_names_it(backend):
    said = run(DRAWN.format(backend=backend), without=("quickjs",))
    assert said.startswith("to_svg: ") and 'pip install "gradtools[svg]"' in said


@pytest.mark.slow
@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_name_that_was_read_is_kept_and_no_room_takes_its_place(backend):
    program = f"""
        import importlib, pkgutil
        import gradtools.{backend} as gt

        before = {{name: getattr(gt, name) for name in gt.__all__}}
        for room in pkgutil.iter_modules(gt.__path__):
            try:
                importlib.import_module(gt.__name__ + "." + room.name)
            except ModuleNotFoundError:  # a room for a library that is not installed
                pass
        print([name for name in gt.__all__ if vars(gt)[name] is not before[name]])
    """
    assert run(program) == "[]"


@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_star_import_has_every_public_name(backend):
    program = f"""
        from gradtools.{backend} import *
        import gradtools.{backend} as gt
        print([name for name in gt.__all__ if globals()[name] is not getattr(gt, name)])
    """
    assert run(program) == "[]"


@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_name_that_does_not_exist_is_told(backend):
    program = f"""
        import gradtools.{backend} as gt
        try:
            gt.gradd
        except AttributeError as error:
            print(error)
    """
    assert run(program) == f"module 'gradtools.{backend}' has no attribute 'gradd'"
