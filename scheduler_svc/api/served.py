"""What is served now."""

from paged.v1 import executor_pb2
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.validation import Limits
from scheduler_svc.errors import Unavailable
from scheduler_svc.settings import SchedulerSettings


def served_model(engine: Engine) -> executor_pb2.ModelFacts:
    """Facts of the model. Raises Unavailable until an executor was attached once."""
    if engine.model is None:
        raise Unavailable("no executor has been attached yet, so no model is known; try again later")
    return engine.model


def served_limits(engine: Engine, settings: SchedulerSettings) -> Limits:
    """What requests are measured against. Raises Unavailable until an executor was attached once."""
    return Limits.of(served_model(engine), settings)
