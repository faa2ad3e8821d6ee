"""What each of our exceptions is to a client, over a real server (rule: nothing of an unexpected one's text)."""

import base64
from urllib.parse import quote

import grpc
import pytest
import structlog

from paged.client import (
    Client,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    ModelNotFoundError,
    PagedClientError,
    RequestAbortedError,
    ResourceExhaustedError,
    ServerError,
    UnavailableError,
)
from scheduler_svc import errors
from scheduler_svc.api.errors import MAX_VIOLATIONS, to_status
from tests.api.scripted_engine import ANSWER, ScriptedEngine


@pytest.mark.parametrize(
    ("raised", "received", "reason"),
    [
        (errors.ModelNotFound("m"), ModelNotFoundError, "MODEL_NOT_FOUND"),
        (errors.DuplicateRequest("m"), DuplicateRequestError, "DUPLICATE_REQUEST"),
        (errors.QueueFull("m", retry_after_s=1.5), ResourceExhaustedError, "QUEUE_FULL"),
        (errors.TooManyWatchers("m"), ResourceExhaustedError, "TOO_MANY_WATCHERS"),
        (errors.DeadlineTooShort("m"), DeadlineExceededError, "DEADLINE_TOO_SHORT"),
        (errors.Unavailable("m"), UnavailableError, "UNAVAILABLE"),
        (errors.RequestAborted("m"), RequestAbortedError, "REQUEST_ABORTED"),
        (errors.RequestFailed("m"), ServerError, "REQUEST_FAILED"),
        (errors.InvalidRequest(errors.FieldViolation("text", "m")), InvalidRequestError, "INVALID_REQUEST"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("after_a_message", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_exception_of_ours_becomes_its_status(
    client: Client,
    engine: ScriptedEngine,
    raised: errors.PagedError,
    received: type[PagedClientError],
    reason: str,
    after_a_message: bool,
    stream: bool,
) -> None:
    engine.script = [ANSWER[0], raised] if after_a_message else [raised]
    texts = []

    async def call() -> None:
        if not stream:
            await client.complete("hi")
        async for message in client.generate("hi"):
            texts.append(message.text)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(received) as caught:
        await call()
    assert texts == (["On"] if stream and after_a_message else [])
    assert type(caught.value) is received
    assert caught.value.reason == reason
    assert "m" in caught.value.message


async def test_a_full_queue_says_when_to_try_again(client: Client, engine: ScriptedEngine) -> None:
    engine.script = [errors.QueueFull("4096 requests wait", retry_after_s=1.5)]
    with pytest.raises(ResourceExhaustedError) as caught:
        await client.complete("hi")
    assert caught.value.retry_after_s == 1.5


async def test_an_exception_of_ours_from_the_tokenizer_becomes_its_status(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.tokenize_error = errors.InvalidRequest(errors.FieldViolation("text", "is too long"))
    for call in (client.complete("hi"), client.tokenize("hi")):
        with pytest.raises(InvalidRequestError) as caught:
            await call
        assert [(v.field, v.description) for v in caught.value.violations] == [("text", "is too long")]


@pytest.mark.parametrize("where", ["generate", "tokenize"])
async def test_an_unexpected_exception_is_told_as_a_reference_to_the_log(
    client: Client, engine: ScriptedEngine, where: str
) -> None:
    secret = ValueError("marker-of-a-prompt")
    engine.script, engine.tokenize_error = [secret], secret if where == "tokenize" else None
    with structlog.testing.capture_logs() as logs, pytest.raises(ServerError) as caught:
        await client.complete("hi")
    assert caught.value.code == grpc.StatusCode.INTERNAL
    assert "marker" not in caught.value.message
    (event,) = logs
    assert event["event"] == "call_failed"
    assert event["reference"] in caught.value.message
    assert event["exc_info"] is secret


async def test_a_request_with_many_violations_still_gets_its_details(client: Client) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.complete([2**32 - 1] * 60, stop=[""] * 16, stop_token_ids=[2**32 - 1] * 64, temperature=-1)
    assert len(caught.value.violations) == MAX_VIOLATIONS
    assert caught.value.reason == "INVALID_REQUEST"


def test_the_longest_details_fit_the_metadata_that_every_client_takes() -> None:
    error = errors.InvalidRequest(*[errors.FieldViolation("語" * 5000, "語" * 5000)] * 50)
    status = to_status(error)
    assert len(base64.b64encode(status.SerializeToString())) + len(quote(status.message)) < 8000
