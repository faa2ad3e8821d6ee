"""What a call of the Triton kernels would launch on a GPU, found without one.

The real wrappers run on tensors that have a shape and no memory, so whatever read a value would fail: a recorded call
is one that does not wait for the device. Each launch can then be compiled for any architecture.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton import attention, launches, shared, write
from kernels.triton.device import Device

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
KERNELS = (
    (launches, ("attention_kernel",)),
    (attention, ("merge_kernel",)),
    (shared, ("shared_kernel", "merge_shared_kernel")),
    (write, ("write_kernel",)),
)
ALIGNMENT = 16  # bytes or counts; Triton compiles for arguments that are multiples of it


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid, every argument by name, and the options it is compiled with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def compiled(self, architecture: int) -> Any:
        """Triton's compiled kernel for sm_<architecture>, for arguments as well aligned as those of this launch."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: dict[tuple[int], Any] = {}
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            kind = _type_of(value, parameter)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = value
            elif isinstance(value, torch.Tensor) or (
                isinstance(value, int) and value % ALIGNMENT == 0 and not parameter.do_not_specialize
            ):
                aligned[(parameter.num,)] = [["tt.divisibility", ALIGNMENT]]
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=aligned)
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=self.options)


def _type_of(value: Any, parameter: Any) -> str:
    """The type that Triton's launcher gives an argument; a one is compiled in, unless that is forbidden."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


class _Recorder:
    """Stands where a kernel stands and notes what it would be launched with."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in list(named) if name not in self._kernel.arg_names}
            bound = inspect.signature(self._kernel.fn).bind(*arguments, **named)
            self._launches.append(Launch(self._kernel, grid, dict(bound.arguments), options))

        return launch


@contextmanager
def recorded(device: Device) -> Iterator[list[Launch]]:
    """Within, the Triton kernels' wrappers take tensors on the device `meta`, and launches are listed, not made."""
    made: list[Launch] = []
    with ExitStack() as stack:
        for module in (attention, write):
            stack.enter_context(patch.object(module, "check_device", lambda *_: device))
        for module, names in KERNELS:
            for name in names:
                stack.enter_context(patch.object(module, name, _Recorder(getattr(module, name), made)))
        yield made
