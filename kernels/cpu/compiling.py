"""Compiles the native kernels: one shared library for each level, kept by what it was made of.

A library is looked for beside this file first (`prebuilt/`, made where there is a compiler), then in the user's cache;
else it is compiled, which takes some ten seconds. `python -m kernels.cpu.build` does so ahead of time.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

import torch

from kernels.cpu.levels import Level

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
CACHE = Path("~/.cache/paged")
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 600
_SEAL_BYTES = 32
_SCRATCH = ".making-"

Told = Callable[[int, int], None]
"""Told how many of how many parts of a library are made: first 0, and all of them last. Only where one is compiled."""


def silent(done: int, total: int) -> None:
    """A Told that nobody hears."""


class BuildError(RuntimeError):
    """A library can be neither found nor made; the text says why, in a clause."""


def find_or_build(level: Level, cache_dir: Path = CACHE, told: Told = silent) -> Path:
    """The library of `level`. Safe to call in several processes at once. Raises BuildError."""
    prebuilt = PREBUILT / f"{stem(level)}.so"
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler()
    try:
        directory = cache_dir.expanduser() / "kernels"
        library = directory / f"{stem(level)}-{_digest(_version(compiler))}.so"
        if _is_whole(library):
            return library
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f"{library.stem}.lock", "w") as lock:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # one compiles, the others wait for what it makes
            if not _is_whole(library):
                build(level, library, compiler, told)
    except BuildError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise BuildError(f"the kernels cannot be kept in {cache_dir}: {error}") from error
    return library


def build(level: Level, library: Path, compiler: str | None = None, told: Told = silent) -> None:
    """Compile and link `library`, which appears at once and whole. Raises BuildError, and OSError of its directory."""
    from torch.utils.cpp_extension import library_paths  # brings setuptools, which only a build needs

    compiler = compiler or _compiler()
    sources = _sources()
    told(0, len(sources))
    for left in library.parent.glob(f"{library.stem}{_SCRATCH}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}{_SCRATCH}", dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *_compile_flags(level), "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made_all = as_completed([pool.submit(_run, command) for command in commands])
            for done, made in enumerate(made_all, 1):
                made.result()
                if done < len(sources):
                    told(done, len(sources))
        linked = Path(scratch) / library.name
        directories = [f"-L{path}" for path in library_paths()]
        _run([compiler, "-shared", "-fopenmp", *map(str, objects), *directories, *_LIBRARIES, "-o", str(linked)])
        _seal(linked)
        os.replace(linked, library)
    told(len(sources), len(sources))


def _seal(library: Path) -> None:
    """Append what its bytes come to, which a loader ignores: one that lost its end would crash who loads it."""
    content = library.read_bytes()
    with open(library, "ab") as file:
        file.write(hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_SEAL_BYTES]).digest() == content[-_SEAL_BYTES:]


_LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu")


def _compile_flags(level: Level) -> list[str]:
    from torch.utils.cpp_extension import include_paths

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
    "-w",  # compilers warn of their own headers
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
    parts = [f"{path.name}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sources]
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
        environment = {**os.environ, "LC_ALL": "C"}  # errors in English
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} ended with {done.returncode}: {errors[0] if errors else 'it says nothing'}")
    return done.stdout
