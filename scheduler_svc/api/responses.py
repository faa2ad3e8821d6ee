"""How answers look on the wire."""

from collections.abc import Iterable

from paged.v1 import inference_pb2
from scheduler_svc.core.sequence import TokenLogprobs
from scheduler_svc.requests import Delta, Finish, Usage


def merge(deltas: Iterable[Delta]) -> Delta:
    """One delta that says what these, of one sample, say together."""
    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish, usage, index, score = None, None, 0, None
    for delta in deltas:
        index = delta.index
        texts.append(delta.text)
        token_ids.extend(delta.token_ids)
        logprobs.extend(delta.logprobs)
        prompt_token_ids.extend(delta.prompt_token_ids)
        prompt_logprobs.extend(delta.prompt_logprobs)
        finish, usage = delta.finish or finish, delta.usage or usage
        score = delta.score if delta.score is not None else score
    return Delta(
        text="".join(texts),
        token_ids=token_ids,
        logprobs=logprobs,
        finish=finish,
        usage=usage,
        index=index,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        score=score,
    )


class PlainColumns:
    """What is new of many generations where that is text and tokens alone."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._texts: list[str] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []

    def add(self, number: int, text: str, token_ids: list[int]) -> None:
        self.numbers.append(number)
        self._texts.append(text)
        self._num_tokens.append(len(token_ids))
        self._token_ids += token_ids

    def say(self, message: inference_pb2.GenerateManyResponse, *, in_columns: bool) -> None:
        """In columns that is quicker by four times, if the client takes them."""
        if in_columns:
            plain = message.plain
            plain.numbers.extend(self.numbers)
            plain.texts.extend(self._texts)
            plain.num_tokens.extend(self._num_tokens)
            plain.token_ids.extend(self._token_ids)
            return
        begin = 0
        for number, text, num_tokens in zip(self.numbers, self._texts, self._num_tokens, strict=True):
            update = message.updates.add()
            update.number = number
            response = update.response
            response.text = text
            response.token_ids.extend(self._token_ids[begin : begin + num_tokens])
            begin += num_tokens


def to_response(request_id: str, delta: Delta) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse()
    response.request_id = request_id
    fill(response, delta)
    return response


def fill(response: inference_pb2.GenerateResponse, delta: Delta) -> None:
    """Have an empty response say what the delta says."""
    # One after another: a third less than all fields in the constructor.
    response.text = delta.text
    response.token_ids.extend(delta.token_ids)
    if delta.index:
        response.index = delta.index
    # The rest is in few messages, and each field that is named costs something even where it is empty.
    if delta.logprobs:
        response.logprobs.extend(map(_logprobs, delta.logprobs))
    if delta.prompt_token_ids or delta.prompt_logprobs:
        response.prompt_token_ids.extend(delta.prompt_token_ids)
        response.prompt_logprobs.extend(map(_logprobs, delta.prompt_logprobs))
    if delta.finish is not None:
        _fill_finish(response.finish, delta.finish)
    if delta.usage is not None:
        _fill_usage(response.usage, delta.usage)
    if delta.score is not None:
        response.score = delta.score


def _logprobs(entry: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        logprob=entry.logprob, rank=entry.rank, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )


def _fill_finish(said: inference_pb2.Finish, finish: Finish) -> None:
    if finish.by_length:
        said.reason = inference_pb2.FINISH_REASON_LENGTH
        return
    said.reason = inference_pb2.FINISH_REASON_STOP
    if finish.token_id is not None:
        said.token_id = finish.token_id
    if finish.stop_string is not None:
        said.stop_string = finish.stop_string


def _fill_usage(said: inference_pb2.Usage, usage: Usage) -> None:
    said.SetInParent()
    said.prompt_tokens, said.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    said.cached_tokens = usage.cached_tokens
