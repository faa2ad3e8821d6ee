"""Where the model runs: which device that is, why it cannot be a GPU, and what running out of its memory means."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from executor_svc.model.free_memory import available_bytes
from executor_svc.model.refusal import ModelRefused
from executor_svc.ranks import Ranks

log = structlog.get_logger(__name__)

_BFLOAT16_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is for CUDA: of torch, of the driver, of kernels."""

    torch_version: str
    cuda_build: bool
    has_gpu: bool  # a device file of the driver is here; one that a container was not given is not
    hidden: bool  # the environment names no GPU to be visible
    num_gpus: int  # that torch can use
    driver_error: str  # what torch said when it looked for the driver; empty where it found all it needs
    has_triton: bool

    @classmethod
    def look(cls) -> "Machine":
        num_gpus, driver_error = 0, ""
        if torch.version.cuda is not None:
            try:
                torch.cuda.init()
                num_gpus = torch.cuda.device_count()
            except (RuntimeError, AssertionError) as error:
                driver_error = str(error).partition("\n")[0]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # CUDA's own; here it only explains what CUDA made of it
        return cls(
            torch_version=torch.__version__,
            cuda_build=torch.version.cuda is not None,
            has_gpu=any(Path("/dev").glob("nvidia[0-9]*")),
            hidden=visible is not None and visible.strip() in ("", "-1"),
            num_gpus=num_gpus,
            driver_error=driver_error,
            has_triton=importlib.util.find_spec("triton") is not None,
        )

    def why_not_cuda(self) -> str | None:
        """What has to be done before a GPU can be used, as a clause; None if nothing."""
        if not self.cuda_build:
            return f"torch {self.torch_version} is a build without CUDA; install torch for CUDA"
        if self.hidden:
            return "CUDA_VISIBLE_DEVICES names no GPU; unset it, or set it to the number of one"
        if "too old" in self.driver_error:
            return (
                f"the NVIDIA driver is too old for torch {self.torch_version} ({self.driver_error}); "
                "update the driver, or install torch for an older CUDA"
            )
        if "no NVIDIA driver" in self.driver_error:
            return "no NVIDIA driver was found; install it, or give this container the GPU"
        if not self.num_gpus:
            return (
                f"the NVIDIA driver shows no GPU ({self.driver_error or 'none is visible'}); see what nvidia-smi says"
            )
        if not self.has_triton:
            return "the package triton, which a GPU's kernels need, is missing: pip install 'paged-inference[gpu]'"
        return None


def choose_device(name: str, machine: Machine | None = None) -> torch.device:
    """`auto`, `cpu` or `cuda`. `auto` takes a GPU if there is one, and does not do without it for a fault of the
    installation. Raises ModelRefused."""
    if name == "cpu":
        return torch.device("cpu")
    machine = machine or Machine.look()
    problem = machine.why_not_cuda()
    if problem is None:
        return torch.device("cuda", 0)
    if name == "cuda":
        raise ModelRefused(f"device is cuda, but {problem}; or set device to cpu")
    if machine.has_gpu and not machine.hidden:
        if machine.cuda_build:
            raise ModelRefused(f"device is auto and there is a GPU, but {problem}; or set device to cpu")
        log.warning("gpu_not_used", reason=problem)
    return torch.device("cpu")


def rank_device(name: str, ranks: Ranks, machine: Machine | None = None) -> torch.device:
    """What a process runs on: a GPU for each of a machine's processes, or its CPU for all. Raises ModelRefused."""
    device = choose_device(name, machine)
    if ranks.size == 1:
        return device
    num_gpus = (machine or Machine.look()).num_gpus
    if device.type == "cpu" and num_gpus:
        raise ModelRefused(
            "device is cpu, but transformers spreads a model over GPUs where there are any; hide them from torchrun: "
            'CUDA_VISIBLE_DEVICES=""'
        )
    if device.type == "cuda" and ranks.local_size > num_gpus:
        raise ModelRefused(
            f"{ranks.local_size} processes on this machine need a GPU each, and there are {num_gpus}; start torchrun "
            f"with --nproc-per-node {num_gpus}"
        )
    return torch.device("cuda", ranks.local_rank) if device.type == "cuda" else device


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelRefused where the device's arithmetic lacks the type."""
    if device.type == "cuda":
        check_capability(dtype, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def check_capability(dtype: torch.dtype, capability: tuple[int, int], name: str) -> None:
    if dtype == torch.bfloat16 and capability < _BFLOAT16_CAPABILITY:
        raise ModelRefused(
            f"dtype is bfloat16, for which a GPU of compute capability 8.0 or more is needed; {name} has "
            f"{capability[0]}.{capability[1]}; set dtype to float16"
        )


@contextmanager
def refusing_out_of_memory(what: str, device: torch.device, *, needed: int | None, lower: str) -> Iterator[None]:
    """Running out of the device's memory inside becomes ModelRefused. `what` needs `needed` bytes, None if unknown;
    `lower` says which settings to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = "more bytes" if needed is None else f"{needed} bytes"
        raise ModelRefused(
            f"{what}: {size} are required, and {available_bytes(device)} bytes are available on {device}; {lower} "
            f"({first_line(error)})"
        ) from error


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
