"""Builds the native code of the examples once, at run time.

The libraries are cached in the user's cache folder under a hash of the source and the tools. Each
library is moved to the cache folder in one step, so interrupted and concurrent builds are safe.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"


class NoCompiler(Exception):
    """Raised if a compiler or a required package is missing; the message suggests a fix."""


def c_library(name):
    """Builds the shared library of native/NAME.c with the system's C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NoCompiler("no C compiler: install gcc or clang, or set the variable CC")

    def build(source, folder):
        library = folder / f"{name}.so"
        run = [compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-lm"]
        _checked(subprocess.run(run, capture_output=True, text=True, check=False))
        return library

    return _cached(SOURCES / f"{name}.c", compiler, build)


def torch_extension(name, sources=SOURCES):
    """Builds the shared library of SOURCES/NAME.cpp as an extension of PyTorch."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise NoCompiler("no C++ compiler: install g++ or clang++, or set the variable CXX")
    try:
        import torch
    except ImportError:
        raise NoCompiler("the kernel is a PyTorch extension, but PyTorch is missing") from None
    from torch.utils import cpp_extension

    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])
    if not cpp_extension.is_ninja_available():
        raise NoCompiler("ninja is missing: pip install ninja")

    def build(source, folder):
        cpp_extension.load(
            name=name,
            sources=[str(source)],
            extra_cflags=["-O1"],
            build_directory=str(folder),
            is_python_module=False,
            is_standalone=False,
        )
        return folder / f"{name}.so"

    library = _cached(sources / f"{name}.cpp", f"{compiler} {torch.__version__}", build)
    torch.ops.load_library(str(library))
    return library


def _cached(source, tools, build):
    """Returns the cached library; if it is missing, `build` creates it in an empty folder."""
    digest = hashlib.sha256(source.read_bytes() + f"{tools} {sys.version}".encode()).hexdigest()
    library = _cache() / f"{source.stem}-{digest[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            os.replace(build(source, Path(folder)), library)
    return library


def _cache():
    """Returns a folder to which only the current user can write."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradtools-examples"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _checked(done):
    if done.returncode:
        raise NoCompiler(f"the compiler failed:\n{done.stderr}")
