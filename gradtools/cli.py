"""Implements the command line: ``gradtools backends``, ``check``, ``cross-check`` and others.

Two tables in this module define options and commands. No framework is imported before a command
needs it, so ``--help`` is fast. The exit status is 0 for success, 1 for failure or a negative
result of a check, and 2 for invalid usage or if a check could not be run.
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import gradtools
from gradtools.printing import SPELLED


def _positions(text: str) -> list[int]:
    if not all(part.strip("- ").isdecimal() for part in text.split(",")):
        expected = f"expected positions of arguments, such as 0 or 0,2; got {text!r}"
        raise argparse.ArgumentTypeError(expected)
    return [int(part) for part in text.split(",")]


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a nonnegative integer, got {text!r}")
    return int(text)


_OPTIONS: dict[str, dict[str, Any]] = {
    "function": {"metavar": "FUNCTION", "help": "package.module:name"},
    "torch": {"metavar": "TORCH", "help": "package.module:name of a function or module"},
    "jax": {"metavar": "JAX", "help": "the same program in JAX"},
    "script": {"metavar": "SCRIPT", "help": "a Python file"},
    "arguments": {"nargs": argparse.REMAINDER, "help": "the script's arguments"},
    "--args": {"metavar": "FILE", "help": "a .npz file (its arrays, in order) or a .npy file"},
    "--shapes": {"help": 'random arguments: "3x4,5:float32,()"'},
    "--seed": {"type": _not_negative, "default": 0, "metavar": "N", "help": "the random seed"},
    "--backend": {"choices": ("torch", "jax"), "help": "default: FUNCTION's framework"},
    "--on": {"choices": ("both", "torch", "jax"), "default": "both", "dest": "backend"},
    "--argnums": {"type": _positions, "default": [0], "help": "positions: 0,2 (default: 0)"},
    "--order": {"type": int, "choices": (0, 1, 2), "default": 1, "help": "order of derivatives"},
    "--dtype": {"help": "cast floating inputs and parameters, for example float64"},
    "--json": {"action": "store_true", "help": "print the result as JSON"},
    "--out": {"metavar": "FILE", "help": "the output file; its suffix selects the format"},
}
_ARGUMENTS = ("--args", "--shapes", "--seed")
_OF_FUNCTION = ("function", *_ARGUMENTS, "--backend", "--argnums")


_COMMANDS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {  # target, help, example, options
    "backends": ("cli:backends", "print the installed frameworks and their versions", "", ()),
    "check": (
        *("testing.check_command:check", "compare small programs on this device with NumPy"),
        *("--backend jax", ("--on",)),
    ),
    "cross-check": (
        *("testing.commands:cross_check", "compare one program in both frameworks up to order 2"),
        "mymodule:torch_loss mymodule:jax_loss --shapes 3x4,5",
        ("torch", "jax", *_ARGUMENTS, "--order", "--dtype"),
    ),
    "checked": (
        *("testing.commands:checked_script", "run a script and check every derivative in it"),
        *("train.py --steps 2", ("script", "arguments")),
    ),
    "why-zero": (
        *("seeing.commands:print_why_zero", "find the lines that make a gradient zero or NaN"),
        *("mymodule:loss --shapes 8x8", (*_OF_FUNCTION, "--json")),
    ),
    "graph": (
        *("seeing.commands:print_graph", "draw a function with its backward passes"),
        *("mymodule:loss --shapes 3x4,3 -o loss.html", (*_OF_FUNCTION, "--order", "--out")),
    ),
    "formula": (
        *("seeing.commands:print_formula", "print a function and its gradient as formulas"),
        *("mymodule:loss --shapes 3x4,3 --order 2", (*_OF_FUNCTION, "--order")),
    ),
}
_STATUS = "The exit status is 0 for success, 1 if a check fails, 2 if it cannot run."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` specifies.

    Args:
        argv: The arguments without the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # ASCII and cp1252 cannot encode all characters
            stream.reconfigure(errors=SPELLED)
    parser = _parser()
    args = parser.parse_args(argv)
    status = 2
    try:
        if args.command is None:
            parser.print_help()
        else:
            module, _, name = _COMMANDS[args.command][0].partition(":")
            status = int(getattr(import_module(f"gradtools.{module}"), name)(args))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # the exit status of SIGPIPE in a shell
    except gradtools.GradtoolsError as error:
        print(f"gradtools {args.command}: {error}", file=sys.stderr)
        status = 1 if args.command == "checked" else 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception:  # the user's program failed: show its full traceback
        traceback.print_exc()
        status = 1 if args.command == "checked" else 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradtools",
        description="Check, draw and explain derivatives in PyTorch and JAX.",
        epilog="example: gradtools why-zero mymodule:loss --shapes 8x8",
    )
    parser.add_argument("--version", action="version", version=f"gradtools {gradtools.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, said, example, options) in _COMMANDS.items():
        one = commands.add_parser(
            name,
            help=said,
            description=f"{said[0].upper()}{said[1:]}. {_STATUS}",
            epilog=f"example:\n  gradtools {name} {example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if "--args" in options:
            inputs = one.add_mutually_exclusive_group(required=name == "cross-check")
        for option in options:
            flags = {"--on": ["--backend"], "--out": ["-o", "--out"]}.get(option, [option])
            group: Any = inputs if option in ("--args", "--shapes") else one
            group.add_argument(*flags, **_OPTIONS[option])
    commands.choices["cross-check"].set_defaults(order=2)
    return parser


def backends(_: argparse.Namespace) -> int:
    """Prints the installed frameworks and their versions; returns the exit status."""
    packages = {"torch": ("torch", "array-api-compat"), "jax": ("jax", "jaxlib", "flax", "optax")}
    for backend, names in packages.items():
        line = f'not installed: pip install "gradtools[{backend}]"'
        if backend in gradtools.available_backends():
            line = ", ".join(f"{name} {version(name)}" for name in names if _is_installed(name))
        print(f"{backend}: {line}")
    return 0


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except ImportError:  # includes PackageNotFoundError
        return False
