"""The command line: ``gradtools demo``, ``backends``, ``check``, ``crosscheck`` and others.

No framework is imported before a command needs it, so ``--help`` answers at once.
Exit status: 0 when the command did what was asked, 1 when it did not or what it looked at does
not hold, 2 for wrong usage, and where a command that judges a program could not be run on it.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import gradtools

_FRAMEWORKS = {
    "torch": ("torch", "array-api-compat"),
    "jax": ("jax", "jaxlib", "flax", "optax", "equinox"),
}
_DEMO_NEEDS = {
    "both": ("sklearn", "scipy", "matplotlib", "tqdm"),
    "torch": ("torch", "array_api_compat"),
    "jax": ("jax",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments without the program's name; ``sys.argv[1:]`` when None.

    Returns:
        The exit status.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    module, _, name = args.run.partition(":")
    try:
        return int(getattr(import_module(module), name)(args))
    except gradtools.GradtoolsError as error:
        print(f"gradtools {args.command}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception:  # a program's own: its place is worth more than a sentence
        traceback.print_exc()
    return int(args.failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradtools",
        description="Unusual things with gradients: one API for PyTorch and JAX.",
    )
    parser.add_argument("--version", action="version", version=f"gradtools {gradtools.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    listing = commands.add_parser("backends", help="say what is installed, with versions")
    listing.set_defaults(run="gradtools.cli:backends", failed=1)
    _add_check(commands)
    _add_crosscheck(commands)
    _add_why_zero(commands)
    _add_graph(commands)
    _add_formula(commands)
    _add_measure(commands)
    table = commands.add_parser(
        "conventions", help="how the frameworks differ at kinks and ties, measured here"
    )
    table.add_argument("containing", nargs="?", default="", help="only rows with this text")
    table.set_defaults(run="gradtools.testing.commands:conventions", failed=1)
    return parser


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "check",
        help="try every operator on this machine: dtypes, transforms, orders, against NumPy",
        description="Exit status 0 if every cell of the matrix held, 1 if one did not, 2 if it "
        "could not be run.",
    )
    command.add_argument("--backend", choices=("both", "torch", "jax"), default="both")
    command.add_argument("--quick", action="store_true", help="a part of it, within a minute")
    command.add_argument("--device", default="auto", help="auto (default), cpu, gpu, tpu, or gpu:1")
    command.add_argument("--filter", default="", metavar="TEXT", help="only cells with this text")
    command.add_argument("--json", action="store_true", help="print every cell as JSON")
    command.set_defaults(run="gradtools.conformance.checking:check", failed=2)


def _add_crosscheck(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser(
        "crosscheck",
        help="compare one program in both frameworks: value and every derivative",
        description="Exit status 0 if the two agree, 1 if not, 2 if they could not be compared.",
    )
    check.add_argument("torch", metavar="TORCH", help="package.module:name, or a module's instance")
    check.add_argument("jax", metavar="JAX", help="the same program in JAX")
    _add_inputs(check, required=True)
    check.add_argument("--order", type=int, choices=(0, 1, 2), default=2, help="default: 2")
    check.add_argument("--dtype", help="cast floating inputs and parameters, for example float64")
    check.add_argument("--conventions", choices=("allow", "raise"), default="allow")
    check.add_argument("--json", action="store_true", help="print the whole report as JSON")
    check.set_defaults(run="gradtools.testing.commands:crosscheck", failed=2)


def _add_why_zero(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "why-zero",
        help="say where the gradient of a function's output to an argument is lost, and the mend",
        description="Exit status 0 if nothing is lost, 1 if something is, 2 if it cannot be told.",
    )
    _add_function(command)
    _add_wrt(command)
    command.set_defaults(run="gradtools.seeing.commands:why_zero", failed=2)


def _add_graph(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "graph",
        help="show a function with its backward passes as a graph: text, or a file to look at",
        description="Exit status 0 if the graph was made, 2 if it could not be.",
    )
    _add_function(command, json=False)
    _add_wrt(command)
    command.add_argument(
        "--order",
        type=int,
        choices=(0, 1, 2),
        default=1,
        help="0 forward alone, 1 with backward, 2 with backward of the backward (default: 1)",
    )
    command.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help="by its suffix a picture (.svg), a page (.html), .dot, .mmd or .txt",
    )
    command.set_defaults(run="gradtools.seeing.commands:graph", failed=2)


def _add_formula(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "formula",
        help="write a function and its gradient as mathematics, compared with the framework's",
        description="Exit status 0 if the formula was found and agrees with automatic "
        "differentiation, 1 if parts of it could not be compared, 2 if it could not be found.",
    )
    _add_function(command, json=False)
    _add_wrt(command)
    command.add_argument(
        "--order",
        type=int,
        choices=(1, 2),
        default=1,
        help="1 with the gradient, 2 with the double backward as well (default: 1)",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE", help="by its suffix text (.txt), LaTeX (.tex) or .md"
    )
    command.set_defaults(run="gradtools.seeing.commands:formula", failed=2)


def _add_wrt(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--wrt",
        type=_positions,
        default=[0],
        metavar="N",
        help="the position of the argument, or of several: 0,2 (default: 0)",
    )


def _add_function(command: argparse.ArgumentParser, json: bool = True) -> None:
    """One function in one framework, as `gradtools.inputs.Given.by` reads it."""
    command.add_argument("function", metavar="FUNCTION", help="package.module:name")
    _add_inputs(command, required=False)
    command.add_argument(
        "--backend", choices=("torch", "jax"), help="default: what FUNCTION's module imports"
    )
    if json:
        command.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_inputs(command: argparse.ArgumentParser, required: bool) -> None:
    inputs = command.add_mutually_exclusive_group(required=required)
    inputs.add_argument(
        "--args", metavar="FILE", help="a .npz file, its arrays in their order, or .npy"
    )
    inputs.add_argument("--shapes", metavar="SHAPES", help='random arguments: "3x4,5:float32,()"')
    command.add_argument(
        "--seed",
        type=_not_negative,
        default=0,
        metavar="N",
        help="of random arguments (default: 0)",
    )


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="domain-adversarial training on real digits, by one program on both frameworks",
        description="Trains a digit classifier on clean images so that it also reads images of "
        "another domain, whose labels it never sees, by reversing one gradient.",
    )
    demo.add_argument("--backend", choices=("both", "torch", "jax"), default="both")
    demo.add_argument("--seeds", type=_positive, default=5, metavar="N", help="default: 5")
    demo.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    demo.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    demo.set_defaults(run="gradtools.cli:demo", failed=1)


def _add_measure(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "measure",
        help="say what a call of a function costs: flops, bytes, bytes kept for backward, time",
        description="Exit status 0 if it could be measured, 2 if not.",
    )
    _add_function(command)
    command.add_argument(
        "--grad",
        action="store_true",
        help="measure value and gradient, along all floating arguments, rather than the value",
    )
    command.set_defaults(run="gradtools.seeing.commands:measure", failed=2)


def _positions(text: str) -> list[int]:
    """Positions of arguments, such as "0,2"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected positions of arguments, such as 0 or 0,2; got {text!r}"
        ) from None


def _positive(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def backends(_: argparse.Namespace) -> int:
    """Says what is installed."""
    for backend, packages in _FRAMEWORKS.items():
        result = backend in gradtools.available_backends()
        mend = f'not installed: pip install "gradtools[{backend}]"'
        print(f"{backend}: {', '.join(_versions(packages)) if result else mend}")
    return 0


def _versions(packages: Sequence[str]) -> list[str]:
    return [f"{package} {_version(package)}" for package in packages]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def demo(args: argparse.Namespace) -> int:
    """Domain-adversarial training on both frameworks."""
    backends = ("torch", "jax") if args.backend == "both" else (args.backend,)
    _require(_DEMO_NEEDS["both"] + sum((_DEMO_NEEDS[name] for name in backends), ()))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = f"no picture can be written there: {error.strerror}."
        raise gradtools.GradtoolsError(f"--out {args.out}: {said}") from error
    from gradtools.demo.run import run_demo

    return run_demo(backends, seeds=args.seeds, out=args.out, quick=args.quick)


def _require(modules: Sequence[str]) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise gradtools.GradtoolsError(
            f"the demo needs {', '.join(missing)}, which cannot be imported here. "
            'Mend: pip install "gradtools[demo]"'
        )
