"""The command line: ``gradtools backends``, ``check``, ``cross-check`` and others.

No framework is imported before a command needs it, so ``--help`` is fast.
Exit status: 0 for success, 1 for failure or a negative result of a check, 2 for wrong usage and if
a check could not be run.
"""

import argparse
import io
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

import gradtools
from gradtools.printing import SPELLED

_FRAMEWORKS = {
    "torch": ("torch", "array-api-compat"),
    "jax": ("jax", "jaxlib", "flax", "optax", "equinox"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments without the program's name; ``sys.argv[1:]`` when None.

    Returns:
        The exit status.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell reports SIGPIPE


def _run(argv: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # ASCII and cp1252 lack characters that we print
            stream.reconfigure(errors=SPELLED)
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    module, _, name = args.run.partition(":")
    try:
        return int(getattr(import_module(module), name)(args))
    except BrokenPipeError:
        raise
    except gradtools.GradtoolsError as error:
        print(f"gradtools {args.command}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception:  # the user's program failed: show its full traceback
        traceback.print_exc()
    return int(args.failed)


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradtools",
        description="Check, draw and explain derivatives in PyTorch and JAX.",
        epilog="example: gradtools why-zero mymodule:loss --shapes 8x8",
    )
    parser.add_argument("--version", action="version", version=f"gradtools {gradtools.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    said = "print which frameworks are installed, and their versions"
    _add(commands, "backends", "cli:backends", said, failed=1)

    check = _add(
        *(commands, "check", "testing.check_command:check"),
        "run a dozen small programs on this machine's device, and compare them with NumPy",
        "Exit status 0 if all agree, 1 if one does not, 2 if it could not be run.",
        example="--backend jax",
    )
    check.add_argument("--backend", choices=("both", "torch", "jax"), default="both")
    check.add_argument("--device", default="auto", help="auto (default), cpu, gpu, tpu, or gpu:1")

    cross_check = _add(
        *(commands, "cross-check", "testing.commands:cross_check"),
        "compare one program in both frameworks: values and derivatives up to second order",
        "Exit status 0 if the two agree, 1 if not, 2 if they could not be compared.",
        example="mymodule:torch_loss mymodule:jax_loss --shapes 3x4,5",
    )
    said = "package.module:name of a function or module"
    cross_check.add_argument("torch", metavar="TORCH", help=said)
    cross_check.add_argument("jax", metavar="JAX", help="the same program in JAX")
    _add_inputs(cross_check, required=True)
    cross_check.add_argument("--order", type=int, choices=(0, 1, 2), default=2, help="default: 2")
    said = "cast floating inputs and parameters, for example float64"
    cross_check.add_argument("--dtype", help=said)
    cross_check.add_argument("--conventions", choices=("allow", "raise"), default="allow")
    cross_check.add_argument("--json", action="store_true", help="print the whole report as JSON")

    script = _add(
        *(commands, "checked", "testing.commands:checked_script"),
        "run a script, and compare every derivative that gradtools takes in it with differences",
        "Exit status 0 if all agree, 1 if one does not, else that of the script.",
        example="train.py --steps 2",
        failed=1,
    )
    script.add_argument("script", metavar="SCRIPT", help="a Python file")
    script.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")

    _add_seeing(commands)
    return parser


def _add(
    commands: Commands,
    name: str,
    run: str,
    help: str,
    status: str = "",
    example: str = "",
    failed: int = 2,
) -> argparse.ArgumentParser:
    """Adds a command, whose help begins with a sentence and ends with an example."""
    command = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(f"{help[0].upper()}{help[1:]}. {status}".rstrip(), 80),
        epilog=f"example:\n  gradtools {name} {example}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=f"gradtools.{run}", failed=failed)
    return command


def _add_seeing(commands: Commands) -> None:
    """Adds the commands on one function, which `CommandInputs.of` reads from their arguments."""
    why_zero = _add(
        *(commands, "why-zero", "seeing.commands:print_why_zero"),
        "find the lines at which a gradient is lost or becomes NaN, and how to fix them",
        "Exit status 0 if nothing is lost, 1 if something is, 2 if it could not be determined.",
        example="mymodule:loss --shapes 8x8",
    )
    graph = _add(
        *(commands, "graph", "seeing.commands:print_graph"),
        "draw a function with its backward passes, as text or in a file",
        "Exit status 0 if the graph was made, 2 if not.",
        example="mymodule:loss --shapes 3x4,3 --order 2 -o loss.html",
    )
    formula = _add(
        *(commands, "formula", "seeing.commands:print_formula"),
        "write a function and its gradient as mathematics, compared with automatic differentiation",
        "Exit status 0 if they agree, 1 if parts could not be compared, 2 if no formula was found.",
        example="mymodule:loss --shapes 3x4,3 --order 2 -o loss.tex",
    )
    for command in (why_zero, graph, formula):
        command.add_argument("function", metavar="FUNCTION", help="package.module:name")
        _add_inputs(command, required=False)
        said = "default: what FUNCTION's module imports"
        command.add_argument("--backend", choices=("torch", "jax"), help=said)
    why_zero.add_argument("--json", action="store_true", help="print the result as JSON")
    for command in (why_zero, graph, formula):
        said = "the position of the argument, or of several: 0,2 (default: 0)"
        command.add_argument("--argnums", type=_positions, default=[0], metavar="N", help=said)
    said = "0 forward alone, 1 with backward, 2 with backward of the backward (default: 1)"
    graph.add_argument("--order", type=int, choices=(0, 1, 2), default=1, help=said)
    said = "by its suffix a page (.html), a picture (.svg), .dot, .mmd or .txt"
    graph.add_argument("-o", "--out", metavar="FILE", help=said)
    said = "1 with the gradient, 2 with the double backward as well (default: 1)"
    formula.add_argument("--order", type=int, choices=(1, 2), default=1, help=said)
    said = "by its suffix text (.txt), LaTeX (.tex) or .md"
    formula.add_argument("-o", "--out", metavar="FILE", help=said)


def _add_inputs(command: argparse.ArgumentParser, required: bool) -> None:
    inputs = command.add_mutually_exclusive_group(required=required)
    said = "a .npz file, its arrays in their order, or .npy"
    inputs.add_argument("--args", metavar="FILE", help=said)
    inputs.add_argument("--shapes", metavar="SHAPES", help='random arguments: "3x4,5:float32,()"')
    said = "of random arguments (default: 0)"
    command.add_argument("--seed", type=_not_negative, default=0, metavar="N", help=said)


def _positions(text: str) -> list[int]:
    """Positions of arguments, such as "0,2"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected positions of arguments, such as 0 or 0,2; got {text!r}"
        ) from None


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def backends(_: argparse.Namespace) -> int:
    """Prints which frameworks are installed."""
    for backend, packages in _FRAMEWORKS.items():
        absent = f'not installed: pip install "gradtools[{backend}]"'
        versions = ", ".join(f"{package} {_version(package)}" for package in packages)
        print(f"{backend}: {versions if backend in gradtools.available_backends() else absent}")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
