"""Compiles the native kernels: one shared library for each level, kept by what it was made of.

A library is looked for beside this file first (`prebuilt/`, made where there is a compiler), then in the user's cache;
else it is compiled, which takes some ten seconds. `python -m kernels.cpu.build` does so ahead of time.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from kernels.cpu.levels import Level

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
CACHE = Path("~/.cache/paged")
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 600


class BuildError(RuntimeError):
    """A library can be neither found nor made; the text says why, in a clause."""


def find_or_build(level: Level, cache_dir: Path = CACHE) -> Path:
    """The library of `level`. Safe to call in several processes at once. Raises BuildError."""
    prebuilt = PREBUILT / f"{stem(level)}.so"
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler()
    directory = cache_dir.expanduser() / "kernels"
    library = directory / f"{stem(level)}-{_digest(_version(compiler))}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f"{library.stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one compiles, the others wait for what it makes
            if not library.exists():
                build(level, library, compiler)
    except OSError as error:
        raise BuildError(f"the kernels cannot be kept in {directory}: {error}") from error
    return library


def build(level: Level, library: Path, compiler: str | None = None) -> None:
    """Compile and link `library`, which appears at once and whole. Raises BuildError."""
    compiler = compiler or _compiler()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in _sources()]
        commands = [
            [compiler, *_compile_flags(level), "-c", str(source), "-o", str(made)]
            for source, made in zip(_sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / library.name
        directories = [f"-L{path}" for path in library_paths()]
        _run([compiler, "-shared", "-fopenmp", *map(str, objects), *directories, *_LIBRARIES, "-o", str(linked)])
        os.replace(linked, library)


_LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu")


def _compile_flags(level: Level) -> list[str]:
    includes = [f"-isystem{path}" for path in include_paths()]
    return [*_FLAGS, *level.flags, *_definitions(level), *includes]


_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-psabi",
)


def _definitions(level: Level) -> list[str]:
    return [
        f"-DPAGED_LIBRARY=paged_cpu_{level.name}",
        f"-DCPU_CAPABILITY={level.capability}",
        f"-DCPU_CAPABILITY_{level.capability}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]


def stem(level: Level) -> str:
    """The name of a library says what it was made of, but for the compiler: that of one prebuilt is not asked for."""
    sources = [path for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    parts = [f"{path.name}:{_digest(path.read_text())}" for path in sources]
    flags = [*_FLAGS, *level.flags, *_definitions(level), *_LIBRARIES]
    return f"paged_cpu_{level.name}-{_digest(torch.__version__, platform.machine(), *flags, *parts)}"


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler() -> str:
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildError(f"there is no C++ compiler ({', '.join(_COMPILERS)}) to build them with")


@cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} ended with {done.returncode}: {errors[0] if errors else 'it says nothing'}")
    return done.stdout
