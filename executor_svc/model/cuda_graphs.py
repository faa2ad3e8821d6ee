"""Records work on a GPU, to be launched again as a whole.

While CUDA records, nothing may wait for the device, and what does can leave the process unable to go on. So the work is
first done under torch's watch, which raises where it would wait; only what passes is recorded.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import torch

from executor_svc.model.decode_graphs import Recorder
from executor_svc.model.device import first_line, refusing_out_of_memory
from executor_svc.model.free_memory import available_bytes
from executor_svc.model.refusal import ModelRefused
from executor_svc.model.runner import ModelRunner

log = structlog.get_logger(__name__)

LOWER = "set cuda_graphs to false, or lower max_rows, memory_share or kv_memory"


class RecordingNotEnded(RuntimeError):
    """CUDA could not end a recording: the process may still count as recording, and cannot be relied on."""


def record_graphs(
    runner: ModelRunner, device: torch.device, table_width: int, recorder: Recorder | None = None
) -> None:
    """Give the runner recorded decode steps. A model that cannot be recorded is served without, and a warning says so.

    `table_width` is the most blocks of a row; `recorder` is CUDA's if left out. Raises ModelRefused where memory does
    not suffice, or where the attempt has left the device unusable.
    """
    before = available_bytes(device)
    try:
        with refusing_out_of_memory("recording decode steps", device, needed=None, lower=LOWER):
            runner.record_graphs(recorder or GraphRecorder(device), table_width)
    except ModelRefused:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises means the same
        reason = f"{type(error).__name__}: {first_line(error)}"
        _check_usable(device, error)
        log.warning("decode_not_recorded", reason=reason, effect="decode steps are launched kernel by kernel")
        return
    sizes = runner.graphs.sizes if runner.graphs is not None else []
    log.info("decode_recorded", sizes=sizes, taken_bytes=before - available_bytes(device))


class GraphRecorder:
    """A `decode_graphs.Recorder`. All that it records shares one pool of memory, so only one may be replayed at a time,
    and what one leaves there lasts until the next."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Raises what `work` raises, also where it would wait for the device; and RecordingNotEnded."""
        self._try_out(work)
        gc.collect()  # what is freed while CUDA records goes to the wrong place
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with _raising_where_it_waits():
                    work()
            finally:
                _end(graph)
        return graph.replay

    def _try_out(self, work: Callable[[], None]) -> None:
        """Twice: the first time kernels are compiled and libraries begin, which may wait."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
            with _raising_where_it_waits():
                work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()


def _end(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except RuntimeError as error:
        raise RecordingNotEnded(first_line(error)) from error


@contextmanager
def _raising_where_it_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _check_usable(device: torch.device, failure: Exception) -> None:
    """Whether the device still computes after a recording that failed."""
    why = f"{type(failure).__name__}: {first_line(failure)}"
    sentence = f"recording decode steps failed and left {device} unusable ({why}); set cuda_graphs to false"
    if isinstance(failure, RecordingNotEnded):
        raise ModelRefused(sentence) from failure
    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError as error:
        raise ModelRefused(sentence) from error
