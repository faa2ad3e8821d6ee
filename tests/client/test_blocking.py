"""The client without an event loop, against a real server in a thread."""

import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from paged.blocking import BlockingClient
from paged.client import Client, InvalidRequestError, NotFoundError, PagedClientError, UnavailableError
from paged.retries import Retries
from scheduler_svc.core.cache_events import STORED, Told
from scheduler_svc.requests import Delta
from tests.api.scripted_engine import ScriptedEngine, forever
from tests.processes import wait_for


@pytest.fixture
def blocking(in_thread: str) -> Iterator[BlockingClient]:
    with BlockingClient(in_thread) as client:
        yield client


def test_an_answer_comes_in_pieces_or_whole(blocking: BlockingClient) -> None:
    assert "".join(message.text for message in blocking.generate("hi")) == "Once!"
    whole = blocking.complete("hi", max_tokens=7)
    assert (whole.text, whole.usage.completion_tokens) == ("Once!", 5)
    assert [sample.text for sample in blocking.complete_samples("hi")] == ["Once!"]


def test_all_else_is_asked_in_the_same_way(blocking: BlockingClient) -> None:
    ids = blocking.tokenize("hi")
    assert blocking.detokenize(ids) == "hi"
    assert [model.model for model in blocking.models()] == [blocking.model().model]
    assert blocking.load().executor_attached
    assert blocking.abort(["nobody"]) == []


def test_what_is_watched_comes_until_the_loop_is_left(blocking: BlockingClient, engine: ScriptedEngine) -> None:
    for _, seen in zip(range(2), blocking.watch(period_ms=100, max_requests=3), strict=False):
        assert seen.num_requests == 0
    engine.told = [("ipc://one", Told(4, [(STORED, b"a")])), ("ipc://two", Told(5, []))]
    assert next(blocking.watch_prefix_cache()).executor == "ipc://one"
    assert blocking.prefix_tree("ipc://one", max_blocks=3).executor == "ipc://one"
    with pytest.raises(NotFoundError):
        blocking.block_tables("nobody")


def test_it_has_every_method_of_the_client_with_the_same_arguments() -> None:
    def methods(client: type) -> dict[str, list[tuple[str, object]]]:
        return {
            name: [(each.name, each.default) for each in inspect.signature(method).parameters.values()]
            for name, method in vars(client).items()
            if inspect.isfunction(method) and not name.startswith("_")
        }

    assert methods(BlockingClient) == methods(Client)


def test_errors_are_those_of_the_client(blocking: BlockingClient) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        blocking.complete("hi", temperature=1000)
    with pytest.raises(InvalidRequestError):
        list(blocking.generate("hi", temperature=1000))
    with pytest.raises(TypeError, match="complete_samples"):
        blocking.complete("hi", n=2)


def test_a_client_that_cannot_be_made_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="unencrypted"):
        BlockingClient("elsewhere.example:1", token="secret")
    assert threading.active_count() == before


def test_nobody_there_is_told_and_the_thread_ends() -> None:
    before = threading.active_count()
    with BlockingClient("127.0.0.1:1", retries=Retries(max_attempts=1)) as client, pytest.raises(UnavailableError):
        client.complete("hi")
    client.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("let_go", ["closed", "forgotten"])
def test_an_answer_that_nobody_wants_any_more_is_ended(
    let_go: str, blocking: BlockingClient, engine: ScriptedEngine
) -> None:
    engine.script = [Delta("On", [11]), forever]
    messages = blocking.generate("hi", ignore_eos=True)
    assert next(messages).text == "On"
    if let_go == "closed":
        messages.close()  # type: ignore[attr-defined]
    else:
        del messages
    wait_for(lambda: not engine.live, "the end of the request")


def test_threads_may_share_one(blocking: BlockingClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: blocking.complete("hi").text, range(32))) == ["Once!"] * 32


def test_closing_ends_what_is_open(in_thread: str, engine: ScriptedEngine) -> None:
    engine.script = [Delta("On", [11]), forever]
    client = BlockingClient(in_thread)
    messages = client.generate("hi")
    next(messages)
    client.close()
    with pytest.raises(RuntimeError, match="is closed"):
        next(messages)
    with pytest.raises(RuntimeError, match="is closed"):
        client.load()
    wait_for(lambda: not engine.live, "the end of the request")


def test_closing_wakes_whoever_waits(in_thread: str, engine: ScriptedEngine) -> None:
    engine.script = [Delta("On", [11]), forever]
    client = BlockingClient(in_thread)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.complete, "hi")
        wait_for(lambda: engine.live, "the request")
        client.close()
        assert isinstance(waiting.exception(30), PagedClientError | CancelledError)
