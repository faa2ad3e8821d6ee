"""What Prometheus reads is what happened, of both services, and costs nothing until it is read."""

import asyncio
import json
import random
import re
import socket
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paged.client import Client
from paged.v1 import inference_pb2
from tests.processes import Service, cleaned_up, start_executor, start_scheduler, wait_for
from tests.system.conftest import System
from tests.system.requests import answer, answers, idle_load, mixed_calls, ready

DEPLOY = Path(__file__).parents[2] / "deploy"
ANY_PORT = ["--metrics-address", "127.0.0.1:0", "--log-format", "json"]

# Labels whose values are all told from the start; bounds of times are those of OpenTelemetry's conventions.
FIRST_TOKEN_S = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 +Inf"
PER_TOKEN_S = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 +Inf"
REQUEST_S = "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92 +Inf"
CLOSED_SETS = [
    ("paged_preemptions_total", "cause", {"blocks", "priority", "recall", "loss"}),
    ("paged_blocks", "state", {"used", "cached", "blank"}),
    ("paged_executor_phase_seconds_total", "phase", {"idle", "take_in", "compute", "answer"}),
    ("paged_time_to_first_token_seconds_bucket", "le", set(FIRST_TOKEN_S.split())),
    ("paged_time_per_output_token_seconds_bucket", "le", set(PER_TOKEN_S.split())),
    ("paged_request_seconds_bucket", "le", set(REQUEST_S.split())),
]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def metrics_address(service: Service) -> str:
    def told() -> list[str]:
        return [json.loads(line)["address"] for line in service.log.splitlines() if "metrics_served" in line]

    wait_for(told, "the metrics' address")
    return told()[0]


def scrape(service: Service) -> Samples:
    with urllib.request.urlopen(f"http://{metrics_address(service)}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Of all samples of that name with these labels, and any others."""
    found = [
        value
        for (other, all_labels), value in samples.items()
        if other == name and all_labels >= frozenset(labels.items())
    ]
    assert found, f"{name} {labels}"
    return sum(found)


async def test_the_numbers_of_both_services_are_those_of_the_requests(system: System) -> None:
    pool = ["--num-blocks", "128", "--max-rows", "24", "--tokens-per-step", "256"]
    system.executor_flags = [*pool, "--simulate-fixed-us", "8000", *ANY_PORT]  # slow enough for all calls to meet
    system.scheduler_flags = [*ANY_PORT, "--metrics-vllm-names"]
    system.start()
    calls = mixed_calls(60, random.Random(4))
    async with Client(system.address) as client:
        await ready(client)
        said = await asyncio.gather(*(answer(client, call) for call in calls))
        long_call = max(calls, key=lambda call: len(call.expected()))
        await answers(client, long_call, cancel_after=1)
        beam = await client.complete_samples([300] * 40, max_tokens=9, beam=inference_pb2.BeamSearch(width=4), n=2)
        load = await idle_load(client)
        ours = await asyncio.to_thread(scrape, system.scheduler)
        executors = await asyncio.to_thread(scrape, system.executor)
    ended = Counter("stop" if ids and ids[-1] == 257 else "length" for ids in said)
    ended.update(["length" if beam[0].finish.reason == inference_pb2.FINISH_REASON_LENGTH else "stop"])
    for how, count in ended.items():
        assert value(ours, "paged_requests_total", ended=how) == count
    assert value(ours, "paged_requests_total", ended="cancelled") == 1
    for name, number in {
        "paged_prompt_tokens_total": load.prompt_tokens,
        "paged_cached_prompt_tokens_total": load.cached_prompt_tokens,
        "paged_generated_tokens_total": load.generated_tokens,
        "paged_preemptions_total": load.preemptions,
        "paged_executor_attached": 1,
        "paged_request_seconds_count": len(calls) + 1,
        "paged_request_prompt_tokens_count": len(calls) + 2,
        "paged_steps_total": load.executors[0].steps,
        "vllm:prompt_tokens_total": load.prompt_tokens,
        "vllm:generation_tokens_total": load.generated_tokens,
        "vllm:e2e_request_latency_seconds_count": len(calls) + 1,
        "vllm:num_requests_running": 0,
        "vllm:kv_cache_usage_perc": 0,
        "paged_executor_losses_total": 0,
    }.items():
        assert value(ours, name) == number, name
    assert value(ours, "paged_blocks") == 127
    assert value(ours, "paged_blocks", state="used") == 0
    assert load.preemptions > 0
    assert value(ours, "paged_preemptions_total", cause="blocks") == load.preemptions
    assert value(ours, "paged_forks_total") > 0
    assert value(ours, "paged_copied_blocks_total") == value(executors, "paged_executor_copied_blocks_total")
    whole, queue, prefill, decode = (
        value(ours, f"paged_request{part}_seconds_sum") for part in ("", "_queue", "_prefill", "_decode")
    )
    assert whole == pytest.approx(queue + prefill + decode)
    first = value(ours, "paged_time_to_first_token_seconds_sum")
    assert first == pytest.approx(queue + prefill)
    assert value(ours, "paged_scheduled_tokens_sum") == value(executors, "paged_executor_tokens_total")
    assert value(executors, "paged_executor_steps_total") == value(executors, "paged_executor_step_seconds_count")
    assert value(executors, "paged_executor_blocks", state="lent") == 127
    assert value(executors, "paged_executor_sessions") == 1
    phases = [value(executors, "paged_executor_phase_seconds_total", phase=p) for p in ("take_in", "compute", "answer")]
    assert sum(phases) == pytest.approx(value(executors, "paged_executor_step_seconds_sum"))


async def test_the_docs_list_what_is_told_and_the_dashboard_asks_for_nothing_else(system: System) -> None:
    system.executor_flags = system.scheduler_flags = ANY_PORT
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        await client.complete([1, 2, 3], max_tokens=2)
    told = scrape(system.scheduler).keys() | scrape(system.executor).keys()
    families = {re.sub("_(bucket|count|sum|created)$", "", name) for name, _ in told}
    assert {name for name in families if name.startswith("paged_")} == documented()
    for name, label, values in CLOSED_SETS:
        assert {dict(labels)[label] for other, labels in told if other == name} == values
    board = (DEPLOY / "grafana" / "dashboards" / "paged.json").read_text()
    asked = set(re.findall(r"\b(?:paged|process)_[a-z_]+", "\n".join(expressions(json.loads(board)))))
    assert len(asked) > 30
    assert asked <= {name for name, _ in told}
    labels = {name: {label for other, pairs in told if other == name for label, _ in pairs} for name in asked}
    for expression in expressions(json.loads(board)):
        for name, matchers in re.findall(r"\b(paged_[a-z_]+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", matchers)) <= labels[name], expression


def documented() -> set[str]:
    """Names of metrics in docs/operations.md; those of executors are there without what they all begin with."""
    text = (DEPLOY.parent / "docs" / "operations.md").read_text().split("\n## ")[1]
    whole = re.findall(r"`(paged_[a-z_]+)[{`]", text)
    return {*whole, *(f"paged_executor{rest}" for rest in re.findall(r"`(_[a-z_]+)[{`]", text))}


def expressions(found: object) -> list[str]:
    """Of all panels' targets."""
    if isinstance(found, dict):
        own = [found["expr"]] if "expr" in found else []
        return own + [expression for value in found.values() for expression in expressions(value)]
    return [expression for value in found for expression in expressions(value)] if isinstance(found, list) else []


async def test_an_interval_counts_for_each_sequence_that_got_a_token_at_both_ends(system: System) -> None:
    system.executor_flags = ["--simulate-fixed-us", "2000"]
    system.scheduler_flags = ANY_PORT
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        for _ in range(2):  # between them nobody waits for a token
            await client.complete([1, 2, 3], max_tokens=20, ignore_eos=True, temperature=0)
        ours = await asyncio.to_thread(scrape, system.scheduler)
    assert value(ours, "paged_token_interval_seconds_count") == 2 * 19


async def test_without_an_address_nothing_listens_and_vllms_names_are_not_told_unasked(system: System) -> None:
    system.executor_flags = ["--log-format", "json"]
    system.scheduler_flags = ANY_PORT
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        await client.complete([1, 2, 3], max_tokens=2)
    assert not [name for name, _ in scrape(system.scheduler) if name.startswith("vllm")]
    assert "metrics_served" not in system.executor.log


def test_an_address_that_is_taken_is_told_and_ends_either_service(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with cleaned_up([]) as services:
            services.append(start_executor(tmp_path, "--simulate", "--metrics-address", address))
            services.append(start_scheduler(tmp_path, "tcp://127.0.0.1:1", "--metrics-address", address))
            for service in services:
                assert service.process.wait(30) == 1
                assert address in service.log
                assert "Traceback" not in service.log
