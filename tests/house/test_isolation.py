"""In fresh processes, imports of gradtools load no unnecessary modules."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest

import gradtools
from tests.support.sizes import MISSION, ROOT

INSTALLED = gradtools.available_backends()
MODULES = ("flax", "optax", "equinox")


def run(program: str, without: tuple[str, ...] = ()) -> str:
    """Return the output of the program in a fresh interpreter that lacks the given packages."""
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
        [sys.executable, "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- fresh processes that import a framework and then its gradtools backend --------------------

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


SEEN = {
    "torch": {
        "dynamo after torch": False,
        "dynamo after a gradient": False,
        "the twin": [],
        "defaults are kept": True,
        "no number was drawn": True,
        "array_api_compat": False,
        "array_api_compat after xp": True,
    },
    "jax": {
        "the twin": [],
        "libraries of modules": [],
        "a device is started": False,
        "settings are kept": True,
        "floats": "float32",
    },
}


@pytest.mark.slow_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_importing_a_wing_imports_little_and_switches_nothing(backend):
    assert json.loads(run({"torch": TORCH, "jax": JAX}[backend])) == SEEN[backend]


# --- programs that run in their own processes ---------------------------------------------------

SEEING = """
held = gt.GradientAccumulator()
held.add(gt.grad(total)(y))
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


@dataclass(frozen=True)
class Program:
    """A program for a fresh process and its expected output.

    Attributes:
        text: The source code, in which {backend} is replaced by the name of a backend.
        prints: The text at the end of the output of the program.
        backends: The backends for which the program runs; "both" requires both frameworks.
        without: Packages that the program cannot import.
        quick: Whether the program runs in the quick tests.
    """

    text: str
    prints: str
    backends: tuple[str, ...] = ("torch", "jax")
    without: tuple[str, ...] = ()
    quick: bool = False


def failing(statement: str, kind: str = "ImportError") -> str:
    return f"""
        try:
            {statement}
        except {kind} as error:
            print(error)
    """


_PYTORCH = 'needs PyTorch, which is not installed. Fix: pip install "gradtools[torch]".'
_JAX = 'needs JAX, which is not installed. Fix: pip install "gradtools[jax]".'
_WORK = """
    import numpy as np
    import gradtools
    import gradtools.{backend} as gt
    assert gradtools.available_backends() == ("{backend}",), gradtools.available_backends()
    x = gt.asarray(np.float32([1.0, 2.0]))
    f = lambda x: (gt.clip_gradient(gt.reverse_gradient(x, 0.5), max_norm=100.0) ** 2).sum()
    print(gt.to_numpy(gt.grad(f)(x)).tolist(), gt.to_numpy(gt.hessian(f)(x)).tolist())
"""
_DERIVED = "[-1.0, -2.0] [[0.5, -0.0], [-0.0, 0.5]]"
PROGRAMS = {
    "gradtools imports no framework": Program(
        """
        import gradtools, sys
        gradtools.available_backends()
        loaded = {{name.split(".")[0] for name in sys.modules}}
        print(sorted(loaded & {{"torch", "jax", "jaxlib", "numpy", "flax", "array_api_compat"}}))
        """,
        "[]",
        ("torch",),
        quick=True,
    ),
    "torch without jax": Program(_WORK, _DERIVED, ("torch",), ("jax", "jaxlib", *MODULES)),
    "jax without torch": Program(
        _WORK, _DERIVED, ("jax",), ("torch", "array_api_compat", *MODULES), quick=True
    ),
    "make_functional without libraries": Program(
        failing("import gradtools.jax as gt; gt.make_functional(object())", "Exception"),
        "variables: make_functional(module, variables=variables).",
        ("jax",),
        ("torch", *MODULES),
    ),
    "torch is missing": Program(
        failing("import gradtools.torch"), _PYTORCH, ("torch",), ("torch",), quick=True
    ),
    "jax is missing": Program(failing("import gradtools.jax"), _JAX, ("jax",), ("jax", "jaxlib")),
    "the bridge without torch": Program(
        failing("import gradtools.bridge"), _PYTORCH, ("jax",), ("torch",)
    ),
    "a check without torch": Program(
        failing("from gradtools.testing import check_derivatives as c; c(abs, (1.0,), 'torch')"),
        _PYTORCH,
        ("jax",),
        ("torch",),
    ),
    "a first call of a rule imports no compiler": Program(
        """
        import sys, torch
        import gradtools.torch as gt
        f = gt.custom_rule(lambda x: x * x)
        f.defvjp(lambda x: (x * x, x), lambda x, c: (2 * x * c,))
        f(torch.ones(3, requires_grad=True)).sum().backward()
        gt.grad(lambda x: f(x).sum())(torch.ones(3))
        print(sorted({{"torch._dynamo", "torch._inductor"}} & set(sys.modules)))
        """,
        "[]",
        ("torch",),
    ),
    "mixed_partial is compiled as the first call": Program(
        """
        import torch
        import gradtools.torch as gt
        x = torch.ones(3)
        f = lambda y: gt.mixed_partial(lambda y, g: (y**3 * g).sum(), lambda z: z**2, y, x, x)
        print(torch.compile(f, fullgraph=True, backend="eager")(x).tolist())
        """,
        "[6.0, 6.0, 6.0]",
        ("torch",),
    ),
    "derivatives do not import gradtools.seeing": Program(MISSION + SEEING, "[]"),
    "derivatives of modules do not import gradtools.seeing": Program(OF_MODULES, "[]", ("torch",)),
    "graphs without the extra svg": Program(
        """
        import numpy as np
        import gradtools
        import gradtools.{backend} as gt
        graph = gt.gradient_graph(gt.xp.exp, gt.asarray(np.ones(3, np.float32)), order=2)
        drawn = str(graph), graph.to_html(), graph._repr_html_(), graph.to_mermaid()
        assert all("exp" in form for form in drawn) and not hasattr(graph, "_repr_svg_")
        try:
            graph.to_svg()
        except gradtools.GradtoolsError as error:
            print('pip install "gradtools[svg]"' in str(error))
        """,
        "True",
        without=("quickjs",),
    ),
    "star imports and the error for an unknown name": Program(
        """
        import importlib, pkgutil
        from gradtools.{backend} import *
        import gradtools.{backend} as gt

        before = {{name: getattr(gt, name) for name in gt.__all__}}
        print([name for name in gt.__all__ if globals()[name] is not before[name]])
        for module in pkgutil.iter_modules(gt.__path__):
            try:
                importlib.import_module(gt.__name__ + "." + module.name)
            except ModuleNotFoundError:  # an integration without its library
                pass
        print([name for name in gt.__all__ if vars(gt)[name] is not before[name]])
        try:
            gt.gradd
        except AttributeError as error:
            print(error)
        """,
        "[]\n[]\nmodule 'gradtools.{backend}' has no attribute 'gradd'",
    ),
    "both backends work in one process": Program(
        """
        import numpy as np
        import gradtools.torch, gradtools.jax
        for gt in (gradtools.torch, gradtools.jax):
            print(float(gt.grad(lambda x: gt.reverse_gradient(x) ** 2)(gt.asarray(np.float32(3)))))
        """,
        "-6.0\n-6.0",
        ("torch",),
    ),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=[] if p.quick else [pytest.mark.slow])
        for name, p in PROGRAMS.items()
        for backend in p.backends
    ],
)
def test_a_program_in_a_fresh_process(name, backend):
    program = PROGRAMS[name]
    missing = {"torch", "jax"} - {*INSTALLED}
    if backend in missing or ("both" in name and missing):
        pytest.skip(f"not installed: {sorted(missing)}")
    text = program.text.replace("{{", "{").replace("}}", "}").replace("{backend}", backend)
    expected = program.prints.replace("{backend}", backend)
    assert run(text, program.without).endswith(expected)


# Modules that a bare import of a backend must not load, because few programs need them.
ASKED_FOR = (
    *("seeing", "testing", "cli", "display", "keras_layers"),
    *("accumulate", "chunking", "custom", "frozen", "kernels", "models"),
)
FRAMEWORK = {"torch": "torch", "jax": "jax, jax.numpy, jax.extend.core"}
LOADED = """
    import sys
    import {framework}
    theirs = set(sys.modules)
    import gradtools.{backend} as gt
    print(*sorted(set(sys.modules) - theirs))
"""


@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("backend", INSTALLED)
def test_a_bare_import_loads_few_rooms_and_none_that_are_asked_for(backend):
    loaded = run(LOADED.format(framework=FRAMEWORK[backend], backend=backend)).split()
    ours = [name for name in loaded if name.split(".")[0] == "gradtools"]
    assert len(ours) < 50
    assert [n for n in ours if set(n.split(".")) & set(ASKED_FOR)] == []
    costly = ("numpy", "html", "statistics", "inspect")
    assert [n for n in loaded if n.split(".")[0] in costly] == []


def test_an_operator_looked_for_in_gradtools_itself_is_told_where_it_stands() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'grad'\. .* import gradtools\.torch"):
        gradtools.grad  # noqa: B018 - the look is what is tested
