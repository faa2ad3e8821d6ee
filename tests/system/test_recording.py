"""What an executor records can be run again and comes to the same: forks, copies, samples that join, masks, cached
prefixes from before the recording, several sessions; and nothing of what was said is in a file unless it was asked for.
"""

import asyncio
import json
import random
from pathlib import Path

import pytest

from executor_svc.recording import recorder
from executor_svc.recording.files import UnreadableRecording, read_recording
from executor_svc.replay.__main__ import main as replay
from executor_svc.settings import ExecutorSettings
from paged.client import Client, ServerError
from paged.v1 import inference_pb2, recording_pb2
from scheduler_svc.core.beam import BeamParameters, BeamSearch, EarlyStopping
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.sequence import Sampling, Sequence
from tests.executor.client import PlanClient
from tests.executor.oracle import prefill
from tests.processes import cleaned_up, start_executor, start_scheduler, wait_for
from tests.system.network import Clock
from tests.system.nodes import ExecutorNode, Link
from tests.system.requests import ready
from tests.system.simulated_answers import VOCAB_SIZE
from tests.system.test_chaos import Requests
from tests.tiny_models import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.tiny_models import save_tiny

POISON = [5, 5, 5]
MARKER = 287  # an id that is in every prompt


def settings(directory: Path, **more: object) -> ExecutorSettings:
    return ExecutorSettings(
        simulate=True, block_size=4, num_blocks=160, max_rows=14, tokens_per_step=30,
        simulate_vocab_size=VOCAB_SIZE, simulate_max_model_len=150,
        record_dir=directory, record_token_ids=True, **more,
    )  # fmt: skip


class Load:
    """Sequences of all kinds for a core, by chance: single ones, samples, beams; half of them begin like others."""

    def __init__(self, seed: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._chance = random.Random(seed)
        self._vocab_size = vocab_size
        self._stems = [[self._chance.randrange(vocab_size) for _ in range(80)] for _ in range(3)]
        self._num = 0

    def submit(self, link: Link) -> None:
        self._num += 1
        chance, name = self._chance, f"r{self._num}"
        stem = chance.choice(self._stems)[: chance.choice([0, 8, 30, 64])]
        prompt = [MARKER, *stem, *(chance.randrange(self._vocab_size) for _ in range(chance.randrange(1, 9)))]
        kind, length = chance.choice(["one", "one", "samples", "beams"]), chance.randrange(1, 40)
        if kind == "one":
            penalty = chance.choice([1.0, 1.0, 1.3])
            sampling = Sampling(temperature=chance.choice([0.0, 1.0]), seed=7, repetition_penalty=penalty, logprobs=2)
            link.submit(Sequence(name, prompt, length, sampling))
        elif kind == "samples":
            samples = [Sequence(name, prompt, length, Sampling(temperature=1.0, seed=7, index=i)) for i in range(3)]
            first, *samples[0].held = samples
            link.submit(first)
        else:
            beams = [Sequence(name, prompt, 12, Sampling(index=i)) for i in range(3)]
            search = BeamSearch(BeamParameters(3, 1.0, EarlyStopping.NO, (), 0, 0))
            beams[0].group = BeamGroup(beams, search)
            link.submit(beams[0])


def run_until(executor: ExecutorNode, links: list[Link], load: Load, num_steps: int) -> None:
    """So many steps, with a few requests of each scheduler at any time."""
    recording = executor.service._recorder
    while recording._num_steps < num_steps:
        for link in links:
            state = link.core.state
            if state.num_running + state.num_waiting < 8:
                load.submit(link)
        act(executor, links)


def act(executor: ExecutorNode, links: list[Link]) -> None:
    """Everybody does something, and all that was sent arrives."""
    for link in links:
        link.act()
        if link.connection is not None:
            executor.router.deliver(link.connection)
    executor.turn()
    executor._clock.now += 0.01


def summary_of(file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    code = replay([str(file), "--json", *flags])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if summary["as_recorded"] else 1)
    return summary


def only_file(directory: Path) -> Path:
    (file,) = directory.iterdir()
    return file


@pytest.mark.parametrize(
    ("num_steps", "seed", "with_ids", "step_us"),
    [
        (15, 1, True, 0.0), (43, 2, True, 0.0), (200, 3, True, 0.0), (43, 2, True, 1.0), (200, 3, True, 1.0),
        (15, 1, False, 0.0), (43, 2, False, 0.0), (200, 3, False, 0.0), (200, 3, False, 1.0),
    ],
)  # fmt: skip
def test_a_recording_runs_again_and_comes_to_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, num_steps: int, seed: int, with_ids: bool, step_us
) -> None:
    """With steps that take time sessions end, and plans break rules, while the device computes."""
    monkeypatch.setattr(recorder, "KEYFRAME_STEPS", 20)
    clock = Clock()
    changes = {"record_token_ids": with_ids, "simulate_fixed_us": step_us}
    executor = ExecutorNode(settings(tmp_path).model_copy(update=changes), clock)
    links = [Link(f"scheduler {i}", executor, clock) for i in range(2)]
    load = Load(seed)
    run_until(executor, links, load, num_steps - 8)
    links[1].detach()  # its rows are free, and soon others'
    run_until(executor, links, load, num_steps)
    executor.service._recorder.write("a test", wait=True)
    summary = summary_of(only_file(tmp_path), capsys)
    assert summary["steps"] == (num_steps if num_steps < 60 else 40 + (num_steps - 1) % 20 + 1)
    assert summary["plans"] > summary["steps"] * 1.3, "both sessions are in most steps"
    assert summary["compared"] == ("values" if with_ids else "lengths")
    assert (summary["differing"], summary["failed"], summary["as_recorded"]) == (0, None, True)
    if num_steps > 20:
        assert kinds_in(only_file(tmp_path)) >= {"forks", "copies", "joined", "started on a prefix"}


def test_a_keyframe_may_fall_into_a_run_of_decode_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """While rows only decode, the batch is not told of every step."""
    monkeypatch.setattr(recorder, "KEYFRAME_STEPS", 20)
    clock = Clock()
    executor = ExecutorNode(settings(tmp_path), clock)
    link = Link("scheduler", executor, clock)
    for i in range(3):
        link.submit(Sequence(f"r{i}", [MARKER, i], 90, Sampling()))
    while executor.service._recorder._num_steps < 85:
        act(executor, [link])
    executor.service._recorder.write("a test", wait=True)
    summary = summary_of(only_file(tmp_path), capsys)
    assert summary["steps"] == 45
    assert (summary["differing"], summary["failed"], summary["as_recorded"]) == (0, None, True)


def kinds_in(file: Path) -> set[str]:
    found = set()
    for entry in read_recording(file)[1]:
        for merged in entry.step.plans:
            plan = merged.plan
            found |= {"forks"} if plan.fork_parents else set()
            found |= {"copies"} if plan.copy_rows else set()
            found |= {"joined"} if plan.joined else set()
            found |= {"masks"} if plan.mask_rows else set()
            found |= {"started on a prefix" for started in plan.started if started.num_computed_tokens}
    return found


def test_a_result_that_was_another_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    executor = ExecutorNode(settings(tmp_path), clock)
    run_until(executor, [Link("scheduler", executor, clock)], Load(5), 30)
    step = executor.service._recorder._parts[-1].entries[11]
    (result,) = step.results
    result.sampled_ids = bytes(len(result.sampled_ids))
    executor.service._recorder.write("a test", wait=True)
    summary = summary_of(only_file(tmp_path), capsys)
    assert summary["differing"] > 0
    assert summary["first_difference"] == f"step {step.number}, plan {result.step} of session 1"


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch) -> None:
    """In steps, in bytes, and in files, of which the newest stay."""
    clock = Clock()
    executor = ExecutorNode(settings(tmp_path, record_max_files=3, record_max_bytes=1 << 20), clock)
    links = [Link("scheduler", executor, clock)]
    run_until(executor, links, Load(6), 800)
    recording = executor.service._recorder
    assert sum(part.num_steps for part in recording._parts) == 2 * 256 + 800 % 256
    monkeypatch.setattr("executor_svc.recording.files.MIN_PAUSE_S", 0.0)
    for number in range(5):
        recording.write(f"number {number}", wait=True)
    reasons = [read_recording(file)[0].reason for file in sorted(tmp_path.iterdir())]
    assert reasons == ["number 2", "number 3", "number 4"]
    recording._max_part_bytes = 20_000
    run_until(executor, links, Load(7), 1000)
    assert all(part.num_bytes < 25_000 for part in recording._parts)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 1 << 20


def test_faults_that_follow_each_other_at_once_share_a_file(tmp_path: Path) -> None:
    clock = Clock()
    executor = ExecutorNode(settings(tmp_path), clock)
    run_until(executor, [Link("scheduler", executor, clock)], Load(8), 5)
    for _ in range(10):
        executor.service._recorder.write("again and again", wait=True)
    assert len(list(tmp_path.iterdir())) == 1


def test_without_token_ids_nothing_of_what_was_said_is_in_a_file(tmp_path: Path) -> None:
    clock = Clock()
    executor = ExecutorNode(settings(tmp_path).model_copy(update={"record_token_ids": False}), clock)
    run_until(executor, [Link("scheduler", executor, clock)], Load(9), 60)
    executor.service._recorder.write("a test", wait=True)
    header, entries = read_recording(only_file(tmp_path))
    assert not header.has_token_ids
    columns = []
    for entry in entries:
        columns += [live.row.token_ids for live in entry.keyframe.rows]
        for merged in entry.step.plans:
            columns += [started.token_ids for started in merged.plan.started]
            columns += [merged.plan.fork_tokens, merged.result.sampled_ids, merged.result.logprob_ids]
            assert not any(started.sampling.seed for started in merged.plan.started)
    assert sum(map(len, columns)) > 1000
    assert not any(any(column) for column in columns)


def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data in {"empty": b"", "text": b"hello, world", "cut": recording_bytes()[:-3]}.items():
        file = tmp_path / name
        file.write_bytes(data)
        with pytest.raises(UnreadableRecording, match=name):
            list(read_recording(file)[1])
    assert replay([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def recording_bytes() -> bytes:
    header = recording_pb2.RecordingHeader(format_version=1, reason="a test")
    data = recording_pb2.RecordingEntry(header=header).SerializeToString()
    return bytes([len(data)]) + data


async def test_a_fault_among_all_kinds_of_requests_of_two_schedulers_is_recorded_and_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples, beams and grammars for more steps than are kept, then a request over which the runner fails."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"faults": [{"row_of_prompt": POISON, "kind": "raise"}]}))
    model = ["--simulate", "--simulate-vocab-size", str(VOCAB_SIZE), "--simulate-script", str(script)]
    pool = ["--num-blocks", "500", "--max-rows", "48", "--tokens-per-step", "128", "--simulate-fixed-us", "200"]
    record = ["--record-dir", str(tmp_path / "records"), "--record-token-ids"]
    requests = Requests(random.Random(1))
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, *model, *pool, *record).wait_until_ready())
        services += [start_scheduler(tmp_path, services[0].address, name=name) for name in ("one", "two")]
        addresses = [service.wait_until_ready().address for service in services[1:]]
        async with Client(addresses[0]) as one, Client(addresses[1]) as two:
            await asyncio.gather(ready(one), ready(two))
            over = asyncio.Event()

            async def ask(client: Client) -> None:
                while not over.is_set():
                    await requests().ask(client)

            asking = [asyncio.create_task(ask(client)) for client in (one, two) for _ in range(4)]
            while (await one.load()).executors[0].steps < 4 * recorder.KEYFRAME_STEPS:
                await asyncio.sleep(0.02)
            with pytest.raises(ServerError):
                await one.complete(POISON, max_tokens=3)
            over.set()
            await asyncio.gather(*asking)
        wait_for(lambda: "recording_written" in services[0].log, "the file")
    files = sorted((tmp_path / "records").iterdir())
    summary = summary_of(files[0], capsys, *model)
    assert summary["steps"] >= 2 * recorder.KEYFRAME_STEPS
    keyframe = next(read_recording(files[0])[1]).keyframe
    assert keyframe.step > recorder.KEYFRAME_STEPS
    assert len(keyframe.rows) > 1
    assert summary["same_weights"]
    assert (summary["differing"], summary["fault_came_again"], summary["as_recorded"]) == (0, True, True)
    assert "scripted failure" in summary["failed"]
    assert kinds_in(files[0]) == {"forks", "copies", "joined", "masks", "started on a prefix"}


@pytest.mark.slow
async def test_a_real_executors_recording_comes_to_the_same_on_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fp32, for more steps than are kept; half of the prompts begin on what is cached, much of it from before the
    recording. It is written because a peer sends a plan that cannot be."""
    directory = save_tiny(tmp_path, "llama")
    model = ["--model", str(directory), "--dtype", "float32"]
    pool = ["--num-blocks", "400", "--block-size", "4", "--max-rows", "24", "--tokens-per-step", "64"]
    record = ["--record-dir", str(tmp_path / "records"), "--record-token-ids"]
    chance = random.Random(1)
    stems = [[chance.randrange(TINY_VOCAB_SIZE) for _ in range(60)] for _ in range(3)]
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, *model, *pool, *record).wait_until_ready())
        services.append(start_scheduler(tmp_path, services[0].address))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            over = asyncio.Event()

            async def ask() -> None:
                while not over.is_set():
                    stem = chance.choice(stems)[: chance.choice([0, 0, 30, 60])]
                    prompt = stem + [chance.randrange(TINY_VOCAB_SIZE) for _ in range(chance.randrange(1, 60))]
                    await client.complete_samples(
                        prompt, max_tokens=chance.randrange(1, 40), logprobs=2, ignore_eos=True,
                        **chance.choice([
                            {"temperature": 0},
                            {"temperature": 1.0, "n": 3, "seed": 5},
                            {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 6},
                            {"beam": inference_pb2.BeamSearch(width=3), "n": 2},
                            {"regex": "[a-f]{3,30}", "seed": 7},
                        ]),
                    )  # fmt: skip

            asking = [asyncio.create_task(ask()) for _ in range(5)]
            while (await client.load()).executors[0].steps < 4 * recorder.KEYFRAME_STEPS:
                await asyncio.sleep(0.05)
            with PlanClient(services[0].address) as stranger:
                await asyncio.to_thread(stranger.attach)
                stranger.send_plan(prefill(row=23, block=399))
                assert (await asyncio.to_thread(stranger.fault)).reason.startswith("started")
            over.set()
            await asyncio.gather(*asking)
    summary = summary_of(only_file(tmp_path / "records"), capsys, *model)
    assert summary["steps"] >= 2 * recorder.KEYFRAME_STEPS
    assert summary["same_weights"]
    assert (summary["compared"], summary["differing"], summary["as_recorded"]) == ("values", 0, True)
    assert kinds_in(only_file(tmp_path / "records")) == {"forks", "copies", "joined", "masks", "started on a prefix"}
