"""Jobs side by side in processes of their own: on a GPU, where compiling takes the most of each."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from benchmarks.gpu.sections import Machine, Report, process_context
from executor_svc.process import die_with_parent

MOST_WORKERS = 8
Job = TypeVar("Job")
Result = TypeVar("Result")


def side_by_side(
    work: Callable[[Job], Result], jobs: Sequence[Job], machine: Machine, report: Report
) -> Iterator[tuple[Job, Result | Exception]]:
    """Each job with its result, or with what it raised, as they come; those that there is no time for are left out."""
    workers = min(MOST_WORKERS, len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=process_context(machine), initializer=die_with_parent) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        for future in as_completed(futures):
            error = future.exception()
            if isinstance(error, Exception):
                yield futures[future], error
            else:
                yield futures[future], future.result()
            if report.time_is_up:
                pool.shutdown(wait=False, cancel_futures=True)
                return
