"""`paged bench` against real schedulers: all that it counts, and what it ends with."""

import asyncio
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paged.cli.bench import show
from paged.cli.exit_codes import ExitCode
from paged.load.generator import Load
from paged.load.lengths import MIXES, Mix, mixed_lengths
from paged.load.plot import draw
from paged.load.report import figures
from paged.load.seen import Seen, percentiles_ms, spread_ms
from tests.processes import Service, cleaned_up, start_executor, start_scheduler, wait_for

END_S = 120.0
QUICK = ("--seconds", "1", "--warm-up-s", "0.2")


def bench(address: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "paged.cli", "bench", "--address", address, *QUICK, *flags)
    return subprocess.run(command, capture_output=True, text=True, timeout=END_S)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two schedulers of an executor whose steps take 5 ms: one that lets 4 sequences wait, and one that lets many."""
    directory = tmp_path_factory.mktemp("bench")
    room = ("--max-rows", "16", "--tokens-per-step", "512", "--simulate-fixed-us", "5000")
    with cleaned_up([]) as services:
        services.append(start_executor(directory, "--simulate", *room).wait_until_ready())
        endpoint = services[0].address
        services.append(start_scheduler(directory, endpoint, name="many"))
        services.append(start_scheduler(directory, endpoint, "--max-waiting-requests", "4", name="few"))
        for service in services[1:]:
            service.wait_until_ready()
            wait_for(lambda address=service.address: _is_served(address), "a model")
        yield services


def _is_served(address: str) -> bool:
    return bool(_load(address)["executor_attached"])


def _load(address: str) -> dict[str, Any]:
    command = (sys.executable, "-m", "paged.cli", "info", "--json", "--address", address)
    told = subprocess.run(command, capture_output=True, text=True, timeout=END_S)
    return json.loads(told.stdout)["load"] if told.returncode == 0 else {"executor_attached": False}


@pytest.fixture
def many(services: list[Service]) -> str:
    return services[1].address


@pytest.fixture
def few(services: list[Service]) -> str:
    return services[2].address


def test_streams_that_are_always_open_are_counted_with_all_of_their_tokens(many: str) -> None:
    done = bench(many, "--concurrency", "4", "--output-tokens", "20", "--json")
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    requests = told["requests"]
    assert requests["sent"] == requests["finished"] > 4
    assert requests["refused"] == requests["unfinished"] == requests["unsent"] == 0
    assert requests["failed"] == {}
    assert told["seconds"] >= 1
    # An answer has 20 tokens, so that 19 steps of 5 ms lie between its first and its last.
    assert told["per_token_ms"]["p50"] >= 5
    assert told["latency_ms"]["p50"] >= 19 * 5 + told["ttft_ms"]["p50"]
    assert list(told["ttft_ms"]) == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert told["load"] == {"concurrency": 4, "prompt_tokens": [32, 96], "output_tokens": [20, 20], "seed": 0}


def test_what_comes_while_too_many_are_open_is_not_sent_but_told(many: str) -> None:
    done = bench(many, "--rate", "200", "--max-open", "2", "--output-tokens", "50", "--json")
    told = json.loads(done.stdout)
    assert told["requests"]["finished"] == told["requests"]["sent"] >= 1
    assert told["requests"]["unsent"] > 10
    assert told["load"]["rate"] == 200


def test_refusals_are_counted_and_are_no_failure(few: str) -> None:
    done = bench(few, "--rate", "300", "--output-tokens", "50", "--json")
    requests = json.loads(done.stdout)["requests"]
    assert done.returncode == ExitCode.OK, done.stderr
    assert requests["refused"] > 0
    assert requests["sent"] == requests["finished"] + requests["refused"]


def test_what_is_not_answered_in_time_is_told(many: str) -> None:
    done = bench(many, "--output-tokens", "4000", "--drain-s", "0", "--rate", "20", "--json")
    requests = json.loads(done.stdout)["requests"]
    assert requests["unfinished"] == requests["sent"] >= 1
    assert requests["failed"] == {}
    assert (done.returncode, done.stderr) == (
        ExitCode.DEADLINE,
        "paged: DEADLINE_EXCEEDED: no answer had ended after --drain-s\n",
    )


def test_people_get_a_table_and_a_picture(many: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = bench(many, "--mix", "short", "--plot", str(tmp_path / "load.svg"))
    assert done.returncode == ExitCode.OK, done.stderr
    assert re.search(r"\d+ requests sent in \d+\.\d s, \d+ answered", done.stdout)
    assert "first token" in done.stdout
    assert "<svg" in (tmp_path / "load.svg").read_text()


def test_times_of_minutes_fit_into_80_columns() -> None:
    seen = Seen(seconds=1.0, ttft_s=[99.0], gaps_s=[99.0], per_token_s=[99.0], latency_s=[0.5])
    out = io.StringIO()
    show(Console(width=80, file=out), figures(Load("", 1, (1, 1), (1, 1)), seen, client_cpu_s=0.1))
    told = out.getvalue()
    assert "between messages" in told
    assert "milliseconds" in told
    assert (told.count(" 99,000 "), told.count(" 500.0 ")) == (6 * 3, 6)


def test_a_picture_can_be_drawn_of_nothing_and_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Seen(seconds=0.5), "nothing", tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")


async def test_a_scheduler_that_dies_is_a_failure_and_what_was_seen_is_told(tmp_path: Path) -> None:
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--simulate", "--simulate-fixed-us", "5000").wait_until_ready())
        services.append(start_scheduler(tmp_path, services[0].address).wait_until_ready())
        wait_for(lambda: _is_served(services[1].address), "a model")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paged.cli", "bench", "--address", services[1].address, "--json"),
            *("--seconds", "1", "--warm-up-s", "0", "--output-tokens", "4000"),  # 20 s each
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await asyncio.to_thread(wait_for, lambda: _load(services[1].address)["running_sequences"] > 0, "load")
        services[1].kill()
        out, err = await asyncio.wait_for(process.communicate(), END_S)
    requests = json.loads(out)["requests"]
    assert requests["failed"] == {"UNAVAILABLE": requests["sent"] - requests["finished"]}
    assert requests["sent"] > requests["finished"]
    assert b"UNAVAILABLE" in err
    assert process.returncode == ExitCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (("--output-tokens", "none"), ExitCode.USAGE, "number of tokens"),
        (("--prompt-tokens", "9-3"), ExitCode.USAGE, "number of tokens"),
        (("--mix", "huge"), ExitCode.USAGE, "'huge' is not one of"),
        (("--output-tokens", "5000"), ExitCode.FAILED, "takes 4096"),
        (("--plot", "load.jpeg"), ExitCode.FAILED, "must end in one of .svg, .png"),
        (("--plot", "nowhere/load.svg"), ExitCode.FAILED, "no directory"),
        (("--model", "other"), ExitCode.REFUSED, "NOT_FOUND"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(many: str, flags: tuple[str, ...], code: int, word: str) -> None:
    done = bench(many, *flags)
    assert (done.returncode, done.stdout) == (code, "")
    assert word in done.stderr


def test_nobody_there_is_unavailable() -> None:
    assert bench("127.0.0.1:1").returncode == ExitCode.UNAVAILABLE


def test_without_matplotlib_the_command_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else found(name, *rest)\n"
        "import paged.cli; sys.argv = ['paged', 'bench', '--plot', 'load.svg']; paged.cli.main()"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=END_S)
    assert done.returncode == ExitCode.FAILED
    assert "paged-inference[plot]" in done.stderr


def test_percentiles_lie_between_the_values_next_to_them() -> None:
    assert percentiles_ms([0.004, 0.001, 0.003, 0.002], (0, 50, 77, 100)) == {
        "p0": 1.0,
        "p50": 2.5,
        "p77": 3.3,
        "p100": 4.0,
    }
    assert spread_ms([0.5]) == {"mean": 500.0, "p50": 500.0, "p90": 500.0, "p95": 500.0, "p99": 500.0, "max": 500.0}
    assert spread_ms([]) == percentiles_ms([]) == {}


def test_tokens_are_counted_by_the_second_in_which_they_came() -> None:
    seen = Seen()
    for num_tokens, second in ((3, 0), (1, 2), (2, 2)):
        seen.count_tokens(num_tokens, second)
    assert (seen.tokens, seen.messages, seen.tokens_by_second) == (6, 3, [3, 0, 3])
    seen.errors = {"RESOURCE_EXHAUSTED": 1, "INTERNAL": 1, "UNAVAILABLE": 2}
    assert (seen.refused, list(seen.failed.items())) == (1, [("UNAVAILABLE", 2), ("INTERNAL", 1)])


@pytest.mark.parametrize("mix", list(Mix))
def test_mixes_have_the_means_of_their_data_sets_and_stay_below_the_longest(mix: Mix) -> None:
    chance = random.Random(0)
    drawn = [mixed_lengths(mix, chance, 1 << 20) for _ in range(20_000)]
    for mean, lengths in zip(MIXES[mix], zip(*drawn, strict=True), strict=True):
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.05)
    assert all(
        num_prompt + num_output <= 64 for num_prompt, num_output in (mixed_lengths(mix, chance, 64) for _ in drawn)
    )
