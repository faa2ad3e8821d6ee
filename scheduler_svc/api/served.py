"""What is served now."""

from paged.v1 import control_pb2
from scheduler_svc.api.engine_face import Model
from scheduler_svc.api.validation import Limits
from scheduler_svc.settings import SchedulerSettings


def limits_of(model: Model, settings: SchedulerSettings) -> Limits:
    """What requests for the model are measured against."""
    return Limits.of(model.facts, settings)


def model_facts(model: Model, settings: SchedulerSettings) -> control_pb2.GetModelResponse:
    """The model as clients are told."""
    facts = model.facts
    return control_pb2.GetModelResponse(
        model=facts.name,
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        max_model_len=limits_of(model, settings).max_model_len,
        eos_token_ids=facts.eos_token_ids,
        bos_token_id=facts.bos_token_id if facts.HasField("bos_token_id") else None,
        dtype=facts.dtype,
        has_chat_template=model.has_chat_template,
        fingerprint=facts.fingerprint,
        block_size=facts.block_size,
    )
