"""The command line: ``gradtools demo``, ``gradtools backends``, ``gradtools --version``.

No framework is imported before a command needs it, so ``--help`` answers at once.
Exit status: 0 when the command did what was asked, 1 when it could not, 2 for wrong usage.
"""

import argparse
import sys
from collections.abc import Sequence
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
    "jax": ("jax", "flax", "optax"),
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
    try:
        return int(args.run(args))
    except gradtools.GradtoolsError as error:
        print(f"gradtools {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradtools",
        description="Unusual things with gradients: one API for PyTorch and JAX.",
    )
    parser.add_argument("--version", action="version", version=f"gradtools {gradtools.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    listing = commands.add_parser("backends", help="say what is installed, with versions")
    listing.set_defaults(run=_backends)
    return parser


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
    demo.set_defaults(run=_demo)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text}")
    return number


def _backends(_: argparse.Namespace) -> int:
    for backend, packages in _FRAMEWORKS.items():
        found = backend in gradtools.available_backends()
        mend = f'not installed: pip install "gradtools[{backend}]"'
        print(f"{backend}: {', '.join(_versions(packages)) if found else mend}")
    return 0


def _versions(packages: Sequence[str]) -> list[str]:
    return [f"{package} {_version(package)}" for package in packages]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _demo(args: argparse.Namespace) -> int:
    backends = ("torch", "jax") if args.backend == "both" else (args.backend,)
    _require(_DEMO_NEEDS["both"] + sum((_DEMO_NEEDS[name] for name in backends), ()))
    from gradtools.demo.run import run_demo

    return run_demo(backends, seeds=args.seeds, out=args.out, quick=args.quick)


def _require(modules: Sequence[str]) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise gradtools.GradtoolsError(
            f"the demo needs {', '.join(missing)}, which cannot be imported here. "
            'Mend: pip install "gradtools[demo]"'
        )


if __name__ == "__main__":
    sys.exit(main())
