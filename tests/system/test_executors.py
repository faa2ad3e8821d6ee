"""One scheduler over several executors: found, chosen, lost, replaced, and told apart by what they serve."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paged.client import Client, InvalidRequestError, ModelNotFoundError
from paged.v1 import control_pb2
from scheduler_svc.core.audit import audit
from scheduler_svc.core.cache_events import CLEARED, STORED, Event
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.errors import InvalidRequest, RequestFailed, Unavailable
from scheduler_svc.requests import GenerationRequest
from tests.processes import Service, cleaned_up, start_executor, start_scheduler
from tests.system.engines import engine_over, samples_ids
from tests.system.requests import Call, idle_load, mixed_calls

SLOW = ["--simulate-fixed-us", "5000"]
PREFIX = list(range(1000, 1400))


@dataclass
class Executors:
    """Simulated ones. Those with a `host` all listen on one port, as replicas behind a name do."""

    directory: Path
    services: list[Service]
    port: int = 0
    by_name: dict[str, Service] = field(default_factory=dict)

    def start(self, name: str, *flags: str, host: str = "127.0.0.1", endpoint: str = "") -> str:
        """Returns its endpoint."""
        port = self.port if host != "127.0.0.1" else 0
        (self.directory / name).mkdir(exist_ok=True)
        endpoint = endpoint or f"tcp://{host}:{port}"
        service = start_executor(self.directory / name, "--simulate", *flags, endpoint=endpoint)
        self.services.append(service)
        self.by_name[name] = service
        address = service.wait_until_ready().address
        self.port = self.port or int(address.rpartition(":")[2])
        return address

    def kill(self, name: str) -> None:
        self.by_name[name].kill()


@pytest.fixture
def executors(tmp_path: Path) -> Iterator[Executors]:
    with cleaned_up([]) as services:
        yield Executors(tmp_path, services)


def as_request(number: int, call: Call, model: str = "") -> GenerationRequest:
    sampling = Sampling(temperature=call.temperature, seed=call.seed)
    return GenerationRequest(
        f"r{number}", call.prompt, sampling, call.max_tokens, cache_salt=call.cache_salt, model=model
    )


async def ask(engine: Engine, number: int, call: Call) -> list[int]:
    (ids,) = await samples_ids(engine, as_request(number, call))
    return ids


async def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def attached(engine: Engine) -> list[str]:
    return [executor.endpoint for model in engine.fleet.models for executor in model.executors]


def parts(engine: Engine) -> dict[str, control_pb2.ExecutorLoad]:
    return {part.endpoint: part for part in engine.load().executors}


def assert_books_add_up(engine: Engine) -> None:
    for driver in engine.fleet.attached:
        audit(driver.scheduler.state)
    assert engine.load().used_blocks == 0


async def test_requests_go_to_both_and_those_that_begin_alike_to_one(executors: Executors, tmp_path: Path) -> None:
    endpoints = [executors.start(name) for name in "ab"]
    async with engine_over(",".join(endpoints), tmp_path / "cache") as engine:
        await until(lambda: len(attached(engine)) == 2)
        fresh = [Call([300 + i] * 40, 4, 0.0, 0, "") for i in range(8)]
        for i, call in enumerate(fresh):
            assert await ask(engine, i, call) == call.expected()
        assert [part.prompt_tokens for part in parts(engine).values()] == [160, 160]
        alike = [Call([*PREFIX, 500 + i], 4, 0.0, 0, "") for i in range(6)]
        for i, call in enumerate(alike):
            assert await ask(engine, i, call) == call.expected()
        computed = sorted(part.prompt_tokens - 160 for part in parts(engine).values())
        assert computed == [0, 6 * 401], "all went where the first had gone"
        assert engine.load().cached_prompt_tokens == 5 * 400
        assert_books_add_up(engine)


async def test_when_one_of_two_is_lost_its_requests_go_on_with_the_other_exactly(
    executors: Executors, tmp_path: Path
) -> None:
    endpoints = [executors.start(name, "--num-blocks", "200", "--max-rows", "8", *SLOW) for name in "ab"]
    calls = mixed_calls(60, random.Random(1))
    async with engine_over(",".join(endpoints), tmp_path / "cache") as engine:
        await until(lambda: len(attached(engine)) == 2)
        asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(calls)]
        await until(lambda: engine.load().generated_tokens > 100)
        before = parts(engine)
        assert all(part.running_sequences == 8 and part.waiting_sequences > 0 for part in before.values())
        executors.kill("a")
        await until(lambda: len(attached(engine)) == 1)
        assert parts(engine)[endpoints[0]].waiting_sequences == 0
        assert await asyncio.gather(*asked) == [call.expected() for call in calls]
        assert engine.load().executor_losses == 1
        assert_books_add_up(engine)


async def test_an_executor_that_is_added_to_a_name_takes_over_who_waits_and_one_that_goes_is_let_go(
    executors: Executors, tmp_path: Path
) -> None:
    flags = ["--num-blocks", "200", "--max-rows", "4", *SLOW]
    executors.start("a", *flags)
    names = {"executor": ["127.0.0.1"]}

    async def resolve(host: str) -> list[str]:
        return names[host]

    calls = [Call([300 + i] * 20, 60, 0.0, 0, "") for i in range(24)]
    name = f"tcp://executor:{executors.port}"
    async with engine_over(name, tmp_path / "cache", resolve=resolve, resolve_s=0.05) as engine:
        asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(calls)]
        await until(lambda: engine.load().generated_tokens > 20)
        executors.start("b", *flags, host="127.0.0.2")
        names["executor"].append("127.0.0.2")
        second = f"tcp://127.0.0.2:{executors.port}"
        await until(lambda: second in attached(engine) and parts(engine)[second].running_sequences == 4)
        assert await asyncio.gather(*asked) == [call.expected() for call in calls]
        generated = engine.load().generated_tokens
        # One that is out of the name serves on while its link lives.
        names["executor"].remove("127.0.0.1")
        last = Call([7, 8, 9], 300, 0.0, 0, "")
        running = asyncio.create_task(ask(engine, 99, last))
        await until(lambda: engine.load().running_sequences == 1)
        executors.kill("a")
        await until(lambda: list(parts(engine)) == [second])
        assert await running == last.expected()
        assert engine.load().generated_tokens >= generated, "what it did still counts"
        assert engine.load().executor_losses == 1
        assert_books_add_up(engine)


async def test_an_executor_that_is_found_by_two_addresses_is_attached_once(
    executors: Executors, tmp_path: Path
) -> None:
    address = executors.start("a", "--insecure", endpoint="tcp://0.0.0.0:0").replace("0.0.0.0", "127.0.0.1")
    twice = f"{address},{address.replace('127.0.0.1', '127.0.0.2')}"
    async with engine_over(twice, tmp_path / "cache") as engine:
        calls = [Call([300 + i] * 20, 60, 0.0, 0, "") for i in range(24)]
        answers = await asyncio.gather(*[ask(engine, i, call) for i, call in enumerate(calls)])
        assert answers == [call.expected() for call in calls]
        assert len(attached(engine)) == 1
        assert len(parts(engine)) == 2
        assert_books_add_up(engine)


async def test_who_waits_while_no_executor_is_there_goes_to_the_first_that_comes(
    executors: Executors, tmp_path: Path
) -> None:
    a, b = [executors.start(name, *SLOW) for name in "ab"]
    calls = [Call([300 + i] * 20, 60, 0.0, 0, "") for i in range(24)]
    async with engine_over(f"{a},{b}", tmp_path / "cache") as engine:
        await until(lambda: len(attached(engine)) == 2)
        asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(calls)]
        await until(lambda: engine.load().generated_tokens > 40)
        for name in "ab":
            executors.kill(name)
        await until(lambda: not attached(engine))
        assert not engine.ready
        assert engine.load().waiting_sequences == 24
        executors.start("b", endpoint=b)
        assert await asyncio.gather(*asked) == [call.expected() for call in calls]
        assert parts(engine)[b].attached
        assert_books_add_up(engine)


async def test_what_only_a_lost_executor_can_hold_waits_for_it_and_what_none_can_is_refused(
    executors: Executors, tmp_path: Path
) -> None:
    small = executors.start("small", "--num-blocks", "12", *SLOW)
    large = executors.start("large", "--num-blocks", "200", *SLOW)
    call = Call([300] * 20, 600, 0.0, 0, "")
    async with engine_over(f"{small},{large}", tmp_path / "cache") as engine:
        await until(lambda: len(attached(engine)) == 2)
        executors.kill("large")
        await until(lambda: attached(engine) == [small])
        asked = asyncio.create_task(ask(engine, 1, call))
        await until(lambda: asked.done() or engine.load().waiting_sequences == 1)
        with pytest.raises(InvalidRequest, match=r"max_tokens: is 4000; .* memory leave 3165"):
            await ask(engine, 2, Call([300] * 20, 4000, 0.0, 0, ""))
        executors.start("large", "--num-blocks", "200", endpoint=large)
        assert await asked == call.expected()
        assert parts(engine)[large].generated_tokens == len(call.expected())
        assert_books_add_up(engine)


async def test_a_poisonous_request_takes_down_two_executors_at_most_and_fails_alone(
    executors: Executors, tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"faults": [{"row_of_prompt": [5, 5, 5], "kind": "raise"}]}))
    flags = ["--simulate-script", str(script), "--simulate-fixed-us", "2000"]
    endpoints = [executors.start(name, *flags) for name in "abcd"]
    others = [Call([300 + i] * 20, 150, 0.0, 0, "") for i in range(40)]
    async with engine_over(",".join(endpoints), tmp_path / "cache") as engine:
        await until(lambda: len(attached(engine)) == 4)
        asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(others)]
        await until(lambda: engine.load().generated_tokens > 40)
        with pytest.raises(RequestFailed):
            await ask(engine, 99, Call([5, 5, 5], 10, 0.0, 0, ""))
        assert await asyncio.gather(*asked) == [call.expected() for call in others]
        losses = sorted(part.losses for part in parts(engine).values())
        assert losses == [0, 0, 1, 3], "once each on two among others, then alone on the second"
        assert_books_add_up(engine)


async def test_an_executor_with_other_weights_is_not_used_while_others_of_its_name_live_and_then_takes_over(
    executors: Executors, tmp_path: Path
) -> None:
    old, new = executors.start("old", *SLOW), executors.start("new", "--simulate-vocab-size", "20000", *SLOW)
    async with engine_over(old, tmp_path / "cache") as engine:
        fingerprint = engine.model("").facts.fingerprint
    async with engine_over(f"{old},{new}", tmp_path / "cache") as engine:
        await until(lambda: len(attached(engine)) == 1 and engine.model("").facts.vocab_size)
        if attached(engine) == [old]:
            first, second, name = old, new, "old"
        else:
            first, second, name = new, old, "new"
        vocab_size = engine.model("").facts.vocab_size
        assert (engine.model("").facts.fingerprint == fingerprint) == (name == "old")
        running = asyncio.create_task(ask(engine, 1, Call([300, 301], 3000, 0.0, 0, "")))
        await until(lambda: engine.load().generated_tokens > 5)
        assert attached(engine) == [first]
        executors.kill(name)
        # It is a known address, so its executor may come back: those that wait for it are not spliced to another model.
        await until(lambda: not attached(engine))
        assert not running.done()
        executors.start(name, "--served-name", "something else", endpoint=first)
        await until(lambda: second in attached(engine))
        with pytest.raises(Unavailable):
            await running
        assert engine.model("simulated").facts.vocab_size != vocab_size
        assert_books_add_up(engine)


async def test_two_models_are_told_apart_by_their_served_names(executors: Executors, tmp_path: Path) -> None:
    one = executors.start("one", "--served-name", "one")
    two = executors.start("two", "--served-name", "two", "--simulate-vocab-size", "20000", "--block-size", "8")
    with cleaned_up([]) as services:
        services.append(start_scheduler(tmp_path, f"{one},{two}"))
        async with Client(services[0].wait_until_ready().address) as client:
            await ready_models(client, 2)
            assert [facts.model for facts in await client.models()] == ["one", "two"]
            assert (await client.model("two")).vocab_size == 20000
            assert (await client.model("one")).block_size == 16
            with pytest.raises(InvalidRequestError, match=r"model: is empty, and several .* 'one', 'two'"):
                await client.complete([1, 2, 3])
            with pytest.raises(InvalidRequestError, match="model: is empty"):
                await client.tokenize("text")
            with pytest.raises(InvalidRequestError, match="model: is empty"):
                await client.model()
            with pytest.raises(ModelNotFoundError, match="'three' is not served here; there is 'one', 'two'"):
                await client.complete([1, 2, 3], model="three")
            with pytest.raises(InvalidRequestError, match="vocabulary size of 20000"):
                await client.complete([25000], model="two")
            call = Call([300, 301, 302], 50, 0.0, 0, "")
            said = [await client.complete(call.prompt, max_tokens=50, temperature=0, model=m) for m in ("one", "two")]
            assert list(said[0].token_ids) == call.expected()
            assert said[1].token_ids != said[0].token_ids
            load = await idle_load(client)
            assert {part.model: part.generated_tokens for part in load.executors} == {
                "one": len(said[0].token_ids),
                "two": len(said[1].token_ids),
            }
            # With one of them gone for good the other is the only one.
            executors.kill("two")
            executors.start("two", "--served-name", "one", endpoint=two)
            await until_async(client, lambda load: [part.model for part in load.executors] == ["one", "one"])
            assert list((await client.complete(call.prompt, max_tokens=50, temperature=0)).token_ids) == call.expected()


async def test_a_watcher_is_told_of_each_executors_cache_under_its_endpoint(
    executors: Executors, tmp_path: Path
) -> None:
    executors.start("a")
    names = {"executor": ["127.0.0.1"]}

    async def resolve(host: str) -> list[str]:
        return names[host]

    first, second = (f"tcp://127.0.0.{i}:{executors.port}" for i in (1, 2))
    seen: dict[str, list[Event]] = {}
    async with engine_over(
        f"tcp://executor:{executors.port}", tmp_path / "cache", resolve=resolve, resolve_s=0.05
    ) as engine:

        async def watch() -> None:
            async for endpoint, told in engine.watch_prefix_cache():
                events = seen.setdefault(endpoint, [])
                if told.starts_anew:
                    events.clear()
                events.extend(told.events)

        watching = asyncio.create_task(watch())
        await ask(engine, 1, Call(PREFIX, 2, 0.0, 0, ""))
        await until(lambda: len(seen.get(first, [])) >= 25)
        assert {kind for kind, _ in seen[first]} == {STORED}
        executors.start("b", host="127.0.0.2")
        names["executor"] = ["127.0.0.2"]
        await until(lambda: second in seen and second in attached(engine))
        executors.kill("a")
        await until(lambda: seen[first][-1][0] == CLEARED and first not in parts(engine))
        await ask(engine, 2, Call(PREFIX, 2, 0.0, 0, ""))
        await until(lambda: len(seen[second]) >= 25)
        watching.cancel()


async def ready_models(client: Client, count: int) -> None:
    async with asyncio.timeout(20):
        while len(await client.models()) < count:
            await asyncio.sleep(0.02)


async def until_async(client: Client, condition: Callable[[control_pb2.GetLoadResponse], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition(await client.load()):
            await asyncio.sleep(0.02)
