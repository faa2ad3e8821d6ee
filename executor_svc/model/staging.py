"""Moves the host's columns of a step to the device in one copy, and its results back in one wait.

On an accelerator the columns are packed into pinned memory and travel in one asynchronous copy; nothing waits for it
but the device itself. On the CPU they are packed in the same way and used where they lie.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Column = NDArray[np.generic]

ALIGNMENT = 16  # bytes; the widest load of a kernel
_SMALLEST_BUFFER = 1 << 16
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Layout:
    """Where columns of given dtypes and shapes lie, one after another, in a buffer of bytes."""

    def __init__(self, columns: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
        self._places: dict[str, tuple[int, int, np.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, (dtype, shape) in columns.items():
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            self._places[name] = (end, size, dtype, shape)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    def arrays(self, buffer: NDArray[np.uint8]) -> dict[str, Column]:
        """The columns as views of `buffer`."""
        return {
            name: buffer[begin : begin + size].view(dtype).reshape(shape)
            for name, (begin, size, dtype, shape) in self._places.items()
        }

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns as views of `buffer`, uint8 on any device."""
        return {
            name: buffer[begin : begin + size].view(_TORCH_DTYPES[dtype]).view(shape)
            for name, (begin, size, dtype, shape) in self._places.items()
        }


class Staging:
    """A buffer on the host and one on the device, large enough for the largest step so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._signature: tuple[object, ...] = ()
        self._layout = Layout({})
        self._arrays: dict[str, Column] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._allocate(_SMALLEST_BUFFER)

    def to_device(self, columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
        """Each column as a tensor of the same dtype and shape on the device; all are void at the next call.

        The columns themselves may change as soon as this returns.
        """
        self._lay_out(columns)
        self._wait_for_copy()
        for name, column in columns.items():
            np.copyto(self._arrays[name], column)
        if self._device.type != "cpu":
            used = self._layout.num_bytes
            self._on_device[:used].copy_(self._on_host[:used], non_blocking=True)
            if self._copied is not None:
                self._copied.record()
        return self._tensors

    def _lay_out(self, columns: Mapping[str, Column]) -> None:
        """Steps of one shape follow each other, so the views made last mostly serve again."""
        signature = tuple((name, column.dtype, column.shape) for name, column in columns.items())
        if signature == self._signature:
            return
        self._layout = Layout({name: (column.dtype, column.shape) for name, column in columns.items()})
        if self._layout.num_bytes > len(self._on_host):
            self._allocate(max(self._layout.num_bytes, 2 * len(self._on_host)))
        self._arrays = self._layout.arrays(self._on_host.numpy())
        self._tensors = self._layout.tensors(self._on_device)
        self._signature = signature

    def _wait_for_copy(self) -> None:
        """Until the copy before has read the buffer; it has, unless that step had no results to wait for."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()

    def _allocate(self, num_bytes: int) -> None:
        self._wait_for_copy()
        on_host = self._device.type == "cpu"
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            self._on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._copied is not None)
            self._on_device = (
                self._on_host if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            )


class Readback:
    """Brings tensors to the host through pinned memory, and waits once for all of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Column]:
        """The tensors' values, in order; arrays of the caller's own. Waits until the device has computed them."""
        if self._device.type != "cuda":
            return [tensor.cpu().numpy() for tensor in tensors]
        shapes = {
            str(i): (torch.empty(0, dtype=tensor.dtype).numpy().dtype, tuple(tensor.shape))
            for i, tensor in enumerate(tensors)
        }
        layout = Layout(shapes)
        if layout.num_bytes > len(self._pinned):
            size = max(layout.num_bytes, 2 * len(self._pinned), _SMALLEST_BUFFER)
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for on_host, tensor in zip(layout.tensors(self._pinned).values(), tensors, strict=True):
            on_host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        return [array.copy() for array in layout.arrays(self._pinned.numpy()).values()]
