"""Registers, spills and shared memory of every kernel that a GPU would run, compiled without one.

    python -m benchmarks.kernel_resources [--representative] [--json] [--write]

Exits with 1 where a kernel spills registers or asks for more shared memory than its architecture gives. `--json`
prints one line; `--write` puts the table into docs/kernels.md, between its two markers.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.kernel_launches import Launch, recorded
from kernels import Rows, Rule, SharedBlocks
from kernels.triton import paged_attention, write_kv
from kernels.triton.device import Device, interpreted

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- resources: begin -->", "<!-- resources: end -->"

# Processors and bytes of shared memory that one block may use: CUDA C++ programming guide, compute capabilities.
DEVICES = {
    80: Device(num_processors=108, shared_memory_bytes=163 * 1024),
    90: Device(num_processors=132, shared_memory_bytes=227 * 1024),
    100: Device(num_processors=148, shared_memory_bytes=227 * 1024),
}
HEAD_SIZES = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (192, 128), (256, 256), (576, 512)]
KINDS = {"decode": 1, "mixed": 3, "wide": 256}  # queries a row
SHARED_BY = (8, 128)  # rows that have blocks in common
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4096},
    "soft_cap": {"soft_cap": 50.0},
    "sinks": {"sinks": True},
    "window, sinks": {"window": 4096, "sinks": True},
    "all": {"window": 4096, "soft_cap": 50.0, "sinks": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUM_KV_HEADS, BLOCK_SIZE, TABLE_WIDTH = 8, 16, 2048


@dataclass(frozen=True, slots=True)
class Variant:
    """One batch to serve. `rows` decides whether contexts are split: few rows are, many are not.

    `members`: as many of the rows have blocks in common, and as many have others."""

    dtype: str
    head_dim: int
    value_dim: int
    kind: str
    options: str = "all"
    group: int = 4
    rows: int = 2
    members: int = 0

    def launches(self, device: Device) -> list[Launch]:
        """Those of the attention over such a batch. Raises KernelInputError where it is refused on the device."""
        dtype, tokens = DTYPES[self.dtype], self.rows * KINDS[self.kind]
        num_heads = NUM_KV_HEADS * self.group
        options, shared = dict(OPTIONS[self.options]), None
        if "sinks" in options:
            options["sinks"] = _tensor(num_heads, dtype=dtype)
        if self.members:
            sizes = {"first": 2, "end": 2, "row_start": 3, "rows": 2 * self.members, "own_start": self.rows}
            shared = SharedBlocks(**{name: _tensor(size, dtype=torch.int32) for name, size in sizes.items()})
        with recorded(device) as launches:
            paged_attention(
                _tensor(tokens, num_heads, self.head_dim, dtype=dtype),
                _tensor(1024, BLOCK_SIZE, NUM_KV_HEADS, self.head_dim, dtype=dtype),
                _tensor(1024, BLOCK_SIZE, NUM_KV_HEADS, self.value_dim, dtype=dtype),
                Rows(
                    _tensor(self.rows, TABLE_WIDTH, dtype=torch.int32),
                    _tensor(self.rows + 1, dtype=torch.int32),
                    _tensor(self.rows, dtype=torch.int32),
                    shared,
                ),
                Rule(0.1, **options),
            )
        return launches


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes. `stack_bytes` a thread: 0 means that no register is spilled."""

    kernel: str
    architecture: int
    dtype: str
    head_dim: int
    value_dim: int
    kind: str
    options: str
    group: int
    split: bool
    members: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    shared_limit: int
    warps: int
    compile_s: float

    @property
    def fits(self) -> bool:
        return self.stack_bytes == 0 and self.shared_bytes <= self.shared_limit


def _tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def every_variant() -> Iterator[Variant]:
    """Each size, dtype and kind: with every option over split contexts, and bfloat16 plain over whole ones, too."""
    for head_dim, value_dim in HEAD_SIZES:
        for kind in KINDS:
            yield Variant("bf16", head_dim, value_dim, kind, "plain", rows=512)
            yield Variant("bf16", head_dim, value_dim, kind)
            if max(head_dim, value_dim) <= 256:  # wider fp32 heads are refused
                yield Variant("fp32", head_dim, value_dim, kind)
            if head_dim in (64, 128, 256):  # fp16 takes what bf16 does
                yield Variant("fp16", head_dim, value_dim, kind)
    for kind in KINDS:
        for options in ("window", "soft_cap", "sinks", "window, sinks"):
            yield Variant("bf16", 128, 128, kind, options, rows=512)
    for members in SHARED_BY:
        for head_dim, value_dim in ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)):
            yield Variant("bf16", head_dim, value_dim, "decode", members=members)
        yield Variant("bf16", 128, 128, "decode", "plain", rows=512, members=members)
        yield Variant("fp32", 128, 128, "decode", members=members)
    for group in (1, 7, 16, 32, 64):  # decode tiles grow with the group
        for head_dim, value_dim in ((64, 64), (128, 128), (256, 256), (576, 512)):
            yield Variant("bf16", head_dim, value_dim, "decode", group=group)


def representative_variants() -> Iterator[Variant]:
    """Few enough for every test run: the extremes of each kind of tile."""
    for kind in KINDS:
        yield Variant("bf16", 128, 128, kind)
        yield Variant("bf16", 80, 80, kind, "plain", rows=512)
        yield Variant("fp16", 256, 256, kind)
        yield Variant("fp32", 128, 128, kind)
    yield Variant("bf16", 576, 512, "decode", "plain", group=16)
    yield Variant("bf16", 128, 128, "decode", group=32)
    for members in SHARED_BY:
        yield Variant("bf16", 128, 128, "decode", members=members)
    yield Variant("bf16", 256, 256, "decode", "plain", members=SHARED_BY[-1])


def measure(variants: Iterator[Variant], architecture: int) -> Iterator[Resources]:
    """Compiles each launch of the variants once; the merge and the writes are among them."""
    device, seen = DEVICES[architecture], set()
    for variant in variants:
        for launch in [*variant.launches(device), *_write(variant, device)]:
            key = (launch.name, repr(_compiled_for(launch)))
            if key not in seen:
                seen.add(key)
                yield _resources(variant, launch, architecture)


def _write(variant: Variant, device: Device) -> list[Launch]:
    dtype = DTYPES[variant.dtype]
    sizes = variant.head_dim, variant.value_dim
    with recorded(device) as launches:
        k, v = (_tensor(64, NUM_KV_HEADS, size, dtype=dtype) for size in sizes)
        caches = (_tensor(1024, BLOCK_SIZE, NUM_KV_HEADS, size, dtype=dtype) for size in sizes)
        write_kv(k, v, next(caches), next(caches), _tensor(64, dtype=torch.int64))
    return launches


def _compiled_for(launch: Launch) -> list[tuple[str, object]]:
    """What makes two launches one compilation: constants, dtypes, options."""
    arguments = [
        (name, value.dtype if isinstance(value, torch.Tensor) else value if name.isupper() else value is None)
        for name, value in launch.arguments.items()
    ]
    return [*arguments, *launch.options.items()]


def _resources(variant: Variant, launch: Launch, architecture: int) -> Resources:
    begin = time.perf_counter()
    compiled = launch.compiled(architecture)
    registers, stack_bytes = _of_cubin(compiled.asm["cubin"])
    return Resources(
        kernel=launch.name.removesuffix("_kernel"),
        architecture=architecture,
        dtype=variant.dtype,
        head_dim=variant.head_dim,
        value_dim=variant.value_dim,
        kind=variant.kind,
        options=variant.options,
        group=variant.group,
        split=bool(launch.arguments.get("SPLIT")),
        members=variant.members,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=compiled.metadata.shared,
        shared_limit=DEVICES[architecture].shared_memory_bytes,
        warps=compiled.metadata.num_warps,
        compile_s=round(time.perf_counter() - begin, 2),
    )


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as the disassembler that comes with Triton reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{tool} does not tell the registers of a kernel: {text!r}")
    return int(found[1]), int(found[2])


def table(resources: list[Resources]) -> str:
    """Markdown: a line for each compiled kernel, and for each architecture registers / KiB of shared memory."""
    lines: dict[tuple[str, ...], dict[int, Resources]] = {}
    for found in resources:
        sizes = str(found.head_dim) if found.head_dim == found.value_dim else f"{found.head_dim}/{found.value_dim}"
        batch = "any"
        if found.kernel == "attention":
            batch = f"{found.kind}, group {found.group}{', split' if found.split else ''}"
            batch += ", rest" if found.members else ""
        elif found.kernel == "shared":
            batch = f"of {found.members} rows, group {found.group}"
        options = found.options if found.kernel in ("attention", "shared") else ""
        lines.setdefault((found.kernel, found.dtype, sizes, batch, options), {})[found.architecture] = found
    heads = ["kernel", "dtype", "head size", "batch", "options", *(f"sm_{number}" for number in DEVICES)]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for key, of in lines.items():
        cells = [_cell(of[number]) if number in of else "" for number in DEVICES]
        rows.append("| " + " | ".join([*key, *cells]) + " |")
    return "\n".join(rows)


def _cell(found: Resources) -> str:
    spilled = "" if found.stack_bytes == 0 else f", {found.stack_bytes} B spilled"
    return f"{found.registers} / {found.shared_bytes / 1024:.0f}{spilled}"


def write_page(resources: list[Resources]) -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(resources)}\n{END}{rest.split(END)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--representative", action="store_true", help="only the few variants of the ordinary tests")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    arguments = parser.parse_args()
    if interpreted():
        parser.error("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    begin = time.perf_counter()
    variants = representative_variants if arguments.representative else every_variant
    resources = [found for number in DEVICES for found in measure(variants(), number)]
    if arguments.write:
        write_page(resources)
    if arguments.json:
        print(json.dumps({"benchmark": "kernel_resources", "kernels": [asdict(found) for found in resources]}))
    else:
        print(table(resources))
        print(f"{len(resources)} kernels in {time.perf_counter() - begin:.0f} s with Triton {triton.__version__}")
    return 0 if all(found.fits for found in resources) else 1


if __name__ == "__main__":
    sys.exit(main())
