"""Makes an executor's recorder from its settings."""

from collections.abc import Callable

from executor_svc.batch import ResidentBatch
from executor_svc.leases import Ownership
from executor_svc.loaded import LoadedModel
from executor_svc.recording.files import RecordingFiles
from executor_svc.recording.recorder import NO_RECORDER, Recorder, Recording
from executor_svc.settings import ExecutorSettings
from paged.v1 import recording_pb2


def make_recorder(
    settings: ExecutorSettings,
    model: LoadedModel,
    batch: ResidentBatch,
    ownership: Ownership,
    identity: Callable[[], tuple[str, int]],
) -> Recorder:
    """`identity` gives the executor's id and its epoch."""
    if settings.record_dir is None:
        return NO_RECORDER
    files = RecordingFiles(
        settings.record_dir.expanduser(), max_files=settings.record_max_files, with_ids=settings.record_token_ids
    )

    def header() -> recording_pb2.RecordingHeader:
        executor_id, epoch = identity()
        return recording_pb2.RecordingHeader(
            executor_id=executor_id,
            epoch=epoch,
            model=model.facts,
            num_blocks=model.num_blocks,
            max_rows=settings.max_rows,
            tokens_per_step=settings.tokens_per_step,
        )

    return Recording(batch, ownership, files, header, max_bytes=settings.record_max_bytes)
