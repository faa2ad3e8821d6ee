"""A request as its answers: the sequences that the core computes for it, and the text that is made of each."""

from collections.abc import Iterable
from dataclasses import replace

from scheduler_svc.answer import Answer
from scheduler_svc.best_of import BestOf
from scheduler_svc.core.beam import BeamParameters, BeamSearch
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.sequence import Sampling, Sequence
from scheduler_svc.delivery import Delivery
from scheduler_svc.gathering import GatheredReader, Gathering
from scheduler_svc.reader import Reader
from scheduler_svc.requests import BeamOptions, GenerationRequest
from scheduler_svc.samples import Samples
from scheduler_svc.text.text_stream import TextStream
from scheduler_svc.text.tokenizer import Tokenizer


def open_request(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    eos_token_ids: Iterable[int],
    echo: str | None,
    delivery: Delivery,
    gathering: Gathering | None = None,
) -> Samples:
    """New sequences, the first of which stands for all until the core has been given it. `echo` is the text that each
    answer begins with. Without a `gathering` they have a reader of their own."""
    is_whole = not request.streams or request.best_of is not None
    if gathering is not None:
        reader: Reader = GatheredReader(request.request_id, gathering, is_whole=is_whole)
    else:
        reader = Reader(request.request_id, is_whole=is_whole)
    delivery.open(reader)
    sampling, end_token_ids = request.sampling, _end_token_ids(request, eos_token_ids)
    if request.best_of is not None and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    answers = []
    for index in range(request.best_of or request.num_samples):
        sequence = _new_sequence(request, sampling, index, end_token_ids)
        answers.append(Answer(sequence, _text_stream(request, tokenizer), reader, echo))
        sequence.owner = answers[-1]
    sequences = [answer.sequence for answer in answers]
    if request.beam is not None:
        sequences[0].group = _beam_group(request.beam, sampling, end_token_ids, sequences)
    else:
        sequences[0].held = tuple(sequences[1:])
    if request.best_of is not None:
        with_logprobs = request.sampling.logprobs is not None
        samples: Samples = BestOf(answers, delivery, request.num_samples, with_logprobs=with_logprobs)
    else:
        samples = Samples(answers, delivery)
    if isinstance(reader, GatheredReader):
        reader.samples = samples
    return samples


def _end_token_ids(request: GenerationRequest, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
    own = () if request.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*own, *request.stop_token_ids)))


def _new_sequence(
    request: GenerationRequest, sampling: Sampling, index: int, end_token_ids: tuple[int, ...]
) -> Sequence:
    if index:
        sampling = replace(sampling, index=index, prompt_logprobs=None)
    return Sequence(
        request_id=request.request_id,
        token_ids=request.prompt_ids,
        max_tokens=request.max_tokens,
        sampling=sampling,
        end_token_ids=end_token_ids,
        cache_salt=request.cache_salt,
        bypass_cache=request.bypass_cache,
        priority=request.priority,
        tenant=request.tenant,
        traceparent=request.trace.traceparent if request.trace is not None and index == 0 else "",
    )


def _text_stream(request: GenerationRequest, tokenizer: Tokenizer) -> TextStream:
    return TextStream(
        tokenizer,
        request.prompt_ids,
        stop_strings=request.stop_strings,
        include_stop_string=request.include_stop_string,
        min_tokens=request.sampling.min_tokens,
    )


def _beam_group(
    beam: BeamOptions, sampling: Sampling, end_token_ids: tuple[int, ...], sequences: list[Sequence]
) -> BeamGroup:
    parameters = BeamParameters(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        end_token_ids=end_token_ids,
        min_tokens=sampling.min_tokens,
        num_told=sampling.logprobs or 0,
    )
    return BeamGroup(sequences, BeamSearch(parameters))
