"""A request that takes the executor down is found by its own scheduler; those of others on that executor go on."""

import asyncio
import json
from pathlib import Path

import pytest

from paged.client import Client, ServerError
from tests.processes import cleaned_up, start_executor, start_scheduler
from tests.system.requests import Call, answer, idle_load, ready

POISON = [5, 5, 5]


@pytest.mark.parametrize("kind", ["raise", "exit"])
async def test_a_request_that_takes_the_executor_down_fails_alone_among_those_of_two_schedulers(
    tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"faults": [{"row_of_prompt": POISON, "kind": kind}]}))
    flags = ["--simulate", "--simulate-script", str(script), "--simulate-fixed-us", "3000"]
    calls = [Call([300 + i] * 20, 300, 0.0, 0, "") for i in range(63)]  # with the poison there are 64
    with cleaned_up([]) as services:
        executor = start_executor(tmp_path, *flags).wait_until_ready()
        services.append(executor)
        endpoint = executor.address

        async def keep_alive() -> None:
            while True:
                await asyncio.to_thread(services[0].process.wait)
                services[0] = start_executor(tmp_path, *flags, endpoint=endpoint)

        services += [start_scheduler(tmp_path, endpoint, name=name) for name in ("one", "two")]
        addresses = [service.wait_until_ready().address for service in services[1:]]
        keeping = asyncio.create_task(keep_alive())
        async with Client(addresses[0]) as one, Client(addresses[1]) as two:
            await ready(one)
            await ready(two)
            clients = [one, two]
            running = [asyncio.create_task(answer(clients[i % 2], call)) for i, call in enumerate(calls)]
            while (await two.load()).generated_tokens < 50:
                await asyncio.sleep(0.01)
            with pytest.raises(ServerError):
                await one.complete(POISON, max_tokens=20)
            assert await asyncio.gather(*running) == [call.expected() for call in calls]
            loads = [await idle_load(client) for client in (one, two)]
        keeping.cancel()
    assert [load.failed_requests for load in loads] == [1, 0]
    assert [load.used_blocks for load in loads] == [0, 0]
