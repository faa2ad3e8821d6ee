"""What the figures were measured on; which tiles the kernels take there, and how long their first call takes."""

import os
import platform
import shutil
import subprocess
import tempfile
import time
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu.backends import checked_backend, prepare
from benchmarks.gpu.batches import Heads, make_batch
from benchmarks.gpu.sections import Machine, Report

PACKAGES = ("torch", "triton", "transformers", "flash-attn")


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    report.add(python=platform.python_version())
    report.add(**{name.replace("-", "_"): _version(name) for name in PACKAGES})
    report.add(gpu=_gpu(device))
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory  # an empty one: a first call is to be one
        prepare(device)
        report.add(first_calls=_first_calls(device, tiny=machine.tiny))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "none"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return answer.stdout.splitlines()[0].strip() if answer.stdout else "unknown"


def _first_calls(device: torch.device, *, tiny: bool) -> dict[str, dict[str, Any]]:
    """Seconds of the first call, which compiles, and ms of a later one, for each kind of batch."""
    backend = checked_backend(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    heads = Heads(4, 2, 64) if tiny else Heads(32, 8, 128)
    long = 40 if tiny else 1000
    found = {}
    for name, rows in {"decode": [(1, long)] * 2, "mixed": [(1, long), (9, 20)], "prefill": [(long, long)]}.items():
        batch = make_batch(rows, heads, block_size=16, dtype=dtype, device=device)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            batch.attend(backend)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        found[name] = {
            "first_s": round(seconds[0], 3),
            "later_ms": round(1e3 * seconds[1], 3),
            "tile": _tile(rows, heads, dtype, device),
        }
    return found


def _tile(rows: list[tuple[int, int]], heads: Heads, dtype: torch.dtype, device: torch.device) -> str:
    from kernels.triton import tiles
    from kernels.triton.device import check_device

    group = heads.query // heads.kv
    kind = tiles.kind_of(sum(queries for queries, _ in rows), len(rows), group)
    return str(tiles.tile_for(kind, group, heads.dim, heads.dim, dtype, check_device(device).shared_memory_bytes))
