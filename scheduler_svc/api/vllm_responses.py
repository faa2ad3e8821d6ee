"""How answers look to callers of VllmEngine: pieces as they come, then one message that the answer has ended."""

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from scheduler_svc.core.sequence import TokenLogprobs
from scheduler_svc.requests import Delta, Finish, GenerationRequest


class VllmAnswers:
    """`say` says what is in a delta, of any of the request's answers."""

    def __init__(self, generation: GenerationRequest) -> None:
        self._generation = generation
        self._num_prompt = len(generation.prompt_ids)
        self._prompt_logprobs: list[TokenLogprobs] = []  # of which the first piece must tell all

    def say(self, delta: Delta) -> Sequence[vllm.GenerateResponse]:
        self._prompt_logprobs += delta.prompt_logprobs
        if not self._generation.streams:
            return (self._complete(delta, delta),)
        messages = []
        if delta.token_ids:
            messages.append(self._chunk(delta))
        if delta.finish is not None:
            messages.append(self._complete(delta, Delta()))
        return messages

    def _chunk(self, delta: Delta) -> vllm.GenerateResponse:
        chunk = vllm.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._num_prompt,
            completion_tokens=len(delta.token_ids),
            index=delta.index,
        )
        if delta.usage is not None:
            chunk.cached_tokens = delta.usage.cached_tokens
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(_output_logprobs(delta))
        if self._prompt_logprobs:
            chunk.input_logprobs.CopyFrom(self._take_input_logprobs())
        return vllm.GenerateResponse(chunk=chunk)

    def _complete(self, delta: Delta, said: Delta) -> vllm.GenerateResponse:
        """Of the last delta of an answer; `said` is what it must tell of the answer itself."""
        if delta.finish is None or delta.usage is None:
            raise RuntimeError("an answer that has not ended")
        complete = vllm.GenerateComplete(
            output_ids=said.token_ids,
            finish_reason="length" if delta.finish.by_length else "stop",
            prompt_tokens=self._num_prompt,
            completion_tokens=delta.usage.completion_tokens,
            cached_tokens=delta.usage.cached_tokens,
            index=delta.index,
        )
        self._tell_match(complete, delta.finish)
        if said.logprobs:
            complete.output_logprobs.CopyFrom(_output_logprobs(said))
        if self._prompt_logprobs:
            complete.input_logprobs.CopyFrom(self._take_input_logprobs())
        return vllm.GenerateResponse(complete=complete)

    def _tell_match(self, complete: vllm.GenerateComplete, finish: Finish) -> None:
        """What has ended it, where that was asked for: a model's own end tokens go without saying."""
        if finish.stop_string is not None:
            complete.matched_stop_str = finish.stop_string
        elif finish.token_id is not None and finish.token_id in self._generation.stop_token_ids:
            complete.matched_token_id = finish.token_id

    def _take_input_logprobs(self) -> vllm.InputLogProbs:
        entries, self._prompt_logprobs = self._prompt_logprobs, []
        first = (vllm.InputTokenLogProb(), vllm.TopLogProbs())  # nothing is known of the first token
        return vllm.InputLogProbs(
            token_logprobs=[first[0], *(vllm.InputTokenLogProb(value=entry.logprob) for entry in entries)],
            token_ids=self._generation.prompt_ids,
            top_logprobs=[first[1], *map(_top_logprobs, entries)],
        )


def _output_logprobs(delta: Delta) -> vllm.OutputLogProbs:
    return vllm.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in delta.logprobs],
        token_ids=delta.token_ids,
        top_logprobs=map(_top_logprobs, delta.logprobs),
    )


def _top_logprobs(entry: TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids)
