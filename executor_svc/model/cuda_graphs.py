"""Records work on a GPU, to be launched again as a whole.

While CUDA records, nothing may wait for the device, and what does can leave the process unable to go on. So the work is
first done under torch's watch, which raises where it would wait; only what passes is recorded.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import torch

from executor_svc.model.device import first_line, refusing_out_of_memory
from executor_svc.model.refusal import ModelRefused
from executor_svc.model.runner import ModelRunner

log = structlog.get_logger(__name__)

LOWER = "set cuda_graphs to false, or lower max_rows, memory_share or kv_memory"


def record_graphs(runner: ModelRunner, device: torch.device, table_width: int) -> None:
    """Give the runner recorded decode steps. A model that cannot be recorded is served without, and a warning says so.

    `table_width` is the most blocks of a row. Raises ModelRefused where memory does not suffice, or where the attempt
    has left CUDA unusable.
    """
    before = torch.cuda.mem_get_info(device)[0]
    try:
        with refusing_out_of_memory("recording decode steps", device, needed=None, lower=LOWER):
            runner.record_graphs(GraphRecorder(device), table_width)
    except ModelRefused:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises means the same
        reason = f"{type(error).__name__}: {first_line(error)}"
        _check_usable(device, reason)
        log.warning("decode_not_recorded", reason=reason, effect="each decode step is launched kernel by kernel")
        return
    sizes = runner.graphs.sizes if runner.graphs is not None else []
    log.info("decode_recorded", sizes=sizes, bytes=before - torch.cuda.mem_get_info(device)[0])


class GraphRecorder:
    """A `decode_graphs.Recorder`. All that it records shares one pool of memory, so only one may be replayed at a time,
    and what one leaves there lasts until the next."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self._try_out(work)
        gc.collect()  # what is freed while CUDA records goes to the wrong place
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with _raising_where_it_waits():
                    work()
            except Exception as error:  # noqa: BLE001 - raised below: a recording has to be ended in any case
                failure = error
            finally:
                graph.capture_end()
        if failure is not None:
            raise failure
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


@contextmanager
def _raising_where_it_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _check_usable(device: torch.device, reason: str) -> None:
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1).item()
    except Exception as error:
        raise ModelRefused(
            f"recording decode steps failed and left CUDA unusable ({reason}; then {first_line(error)}); "
            "set cuda_graphs to false"
        ) from error
