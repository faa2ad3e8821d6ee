"""The instruction sets that the native kernels are compiled for, and which of them this CPU runs.

One library is built of the same sources for each level. A level holds what the one before it holds, so a CPU that runs
one runs all below it; `neon` stands alone.
"""

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-DPAGED_BF16_DOT")
_TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")


@dataclass(frozen=True, slots=True)
class Level:
    """`capability` is what ATen's vectors are compiled for; `cpu_flags` are those of /proc/cpuinfo that it takes."""

    name: str
    capability: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]

    @property
    def is_arm(self) -> bool:
        return self.name == "neon"


def _level(name: str, capability: str, flags: tuple[str, ...], cpu_flags: str) -> Level:
    return Level(name, capability, flags, frozenset(cpu_flags.split()))


_FLAGS_AVX2 = "avx2 fma f16c"
_FLAGS_AVX512 = _FLAGS_AVX2 + " avx512f avx512bw avx512vl avx512dq"
_FLAGS_BF16 = _FLAGS_AVX512 + " avx512_bf16 avx512_vnni"

# From the least to the most; `amx_emulated` runs the code of `amx` without its instructions, far slower: for tests.
LEVELS = {
    level.name: level
    for level in (
        _level("neon", "DEFAULT", (), ""),
        _level("avx2", "AVX2", _AVX2, _FLAGS_AVX2),
        _level("avx512", "AVX512", _AVX512, _FLAGS_AVX512),
        _level("avx512_bf16", "AVX512", _AVX512_BF16, _FLAGS_BF16),
        _level("amx_emulated", "AVX512", (*_AVX512_BF16, "-DPAGED_TILES", "-DPAGED_EMULATE_TILES"), _FLAGS_BF16),
        _level("amx", "AVX512", (*_AVX512_BF16, *_TILES, "-DPAGED_TILES"), _FLAGS_BF16 + " amx_tile amx_bf16 amx_int8"),
    )
}


@cache
def supported() -> tuple[str, ...]:
    """Names of the levels that this CPU runs, the best first, without the emulated one; empty for an unknown CPU."""
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return ("neon",)
    if machine not in ("x86_64", "amd64"):
        return ()
    has = _cpu_flags()
    names = [level.name for level in LEVELS.values() if not level.is_arm and level.cpu_flags <= has]
    if "amx" in names and not _tiles_are_granted():
        names.remove("amx")
    return tuple(name for name in reversed(names) if name != "amx_emulated")


def emulated() -> tuple[str, ...]:
    """Names of the levels that this CPU runs with other instructions than theirs, far slower: for tests."""
    return ("amx_emulated",) if "avx512_bf16" in supported() else ()


def _cpu_flags() -> frozenset[str]:
    """As the kernel lists them: what the operating system does not save between threads is not among them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        # Not Linux. What torch found out is less, and enough.
        capability = torch.backends.cpu.get_cpu_capability()
        return frozenset({"AVX512": _FLAGS_AVX512, "AVX2": _FLAGS_AVX2}.get(capability, "").split())
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _tiles_are_granted() -> bool:
    """Ask Linux for the tiles' registers, as each process must before it first uses them."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(arch_prctl, request_permission, tile_data) == 0)
