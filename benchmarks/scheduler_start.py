"""How soon a scheduler serves, and how much memory it takes, with the tokenizer of the small real model.

That tokenizer has 262,144 entries. The time is from the start of the process to SERVING in its health service, with an
executor that is ready: once with an empty cache, so that the tokenizer is fetched from the executor, then with the
cached one. Memory is what is resident after a first request.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc.model.demo_model import demo_model_path
from paged.client import Client

POOL = ["--num-blocks", "64", "--max-rows", "4", "--tokens-per-step", "64"]
SERVICE = "paged.v1.InferenceService"


async def start_once(endpoint: str, directory: Path) -> tuple[float, float]:
    """Seconds to SERVING, and MB resident after a request."""
    address_file = directory / "address"
    address_file.unlink(missing_ok=True)
    where = ["--listen-address", "127.0.0.1:0", "--executor-endpoint", endpoint]
    files = ["--address-file", str(address_file), "--cache-dir", str(directory / "tokenizers")]
    command = [sys.executable, "-m", "scheduler_svc", "--exit-with-parent", "--log-level", "error", *where, *files]
    began = time.perf_counter()
    process = subprocess.Popen(command)
    try:
        address = await written(address_file, process)
        await serving(address)
        seconds = time.perf_counter() - began
        async with Client(address) as client:
            await client.complete("The capital of France is", max_tokens=4)
        return seconds, resident_mb(process.pid)
    finally:
        process.terminate()
        process.wait()


async def written(file: Path, process: subprocess.Popen) -> str:
    """What a starting service writes to its address file."""
    while not file.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the process has ended with code {process.returncode}")
        await asyncio.sleep(0.005)
    return file.read_text().strip()


async def serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def measure(model: str, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        endpoint_file = directory / "endpoint"
        where = ["--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(endpoint_file), "--exit-with-parent"]
        command = [sys.executable, "-m", "executor_svc", "--model", model, "--log-level", "error", *where, *POOL]
        executor = subprocess.Popen(command)
        stack.callback(executor.wait)
        stack.callback(executor.terminate)
        endpoint = await written(endpoint_file, executor)
        cold_s, _ = await start_once(endpoint, directory)
        warm = [await start_once(endpoint, directory) for _ in range(repeats)]
    return {
        "start_s": round(statistics.median(seconds for seconds, _ in warm), 2),
        "first_start_s": round(cold_s, 2),
        "resident_mb": round(max(mb for _, mb in warm), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--model", help="directory, hub id or .gguf file in place of the small model")
    parser.add_argument("--repeats", type=int, default=3, help="starts with a cached tokenizer")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.model or str(demo_model_path()), args.repeats))
    if args.json:
        print(json.dumps(figures))
    else:
        print(
            f"serving after {figures['start_s']} s ({figures['first_start_s']} s with an empty cache), "
            f"{figures['resident_mb']} MB resident"
        )


if __name__ == "__main__":
    main()
