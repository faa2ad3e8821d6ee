"""The flight recorder: what the executor did last, written to a file after a fault. `executor_svc.replay` runs one."""

from executor_svc.recording.making import make_recorder
from executor_svc.recording.recorder import NO_RECORDER, Recorder, Taken

__all__ = ["NO_RECORDER", "Recorder", "Taken", "make_recorder"]
