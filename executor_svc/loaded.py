"""What an executor serves, whichever way it was made: the real loader and the simulated one both end here."""

from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.step import Runner
from paged.v1 import executor_pb2


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run its first step.

    `bundle` is the zip of the tokenizer's files; `num_blocks` counts block 0, which is never lent;
    `warm_up_ms` is the longest step that was timed at load, at least 1; `close` is to be called once nothing more will
    be run.
    """

    runner: Runner
    facts: executor_pb2.ModelFacts
    bundle: bytes
    num_blocks: int
    warm_up_ms: int
    close: Callable[[], None] = _nothing
