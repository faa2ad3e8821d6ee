"""Whatever is in a file that is to be replayed: it runs, or somebody is told what is wrong with it."""

import io
from collections import Counter
from pathlib import Path

import pytest
from google.protobuf.proto import serialize_length_prefixed

from executor_svc.recording.files import read_recording
from executor_svc.replay.__main__ import main as replay
from executor_svc.settings import ExecutorSettings, parse
from paged.v1 import recording_pb2
from tests.fuzz.messages import Fuzzer
from tests.system.network import Clock
from tests.system.nodes import ExecutorNode, Link
from tests.system.test_recording import Load, only_file, run_until

NUM_STEPS = 6


def recorded(directory: Path) -> list[recording_pb2.RecordingEntry]:
    """Steps of two schedulers with samples and beams, and header and keyframe before them."""
    settings = ExecutorSettings(
        simulate=True, simulate_vocab_size=300, simulate_max_model_len=150, num_blocks=160, block_size=4, max_rows=8,
        tokens_per_step=30, record_dir=directory, record_token_ids=True,
    )  # fmt: skip
    clock = Clock()
    executor = ExecutorNode(settings, clock)
    load, links = Load(4, vocab_size=300), [Link(f"scheduler {i}", executor, clock) for i in range(2)]
    run_until(executor, links, load, 15)
    executor.service._recorder._parts.clear()  # rows are live when the keyframe is made
    run_until(executor, links, load, 15 + NUM_STEPS)
    executor.service._recorder.write("a test", wait=True)
    header, entries = read_recording(only_file(directory))
    return [recording_pb2.RecordingEntry(header=header), *entries]


def changed(entries: list[recording_pb2.RecordingEntry], fuzzer: Fuzzer) -> bytes:
    """A file of them in which something is not as it was written."""
    chance, entries = fuzzer.chance, list(entries)
    for _ in range(chance.choice((1, 1, 2))):
        place = chance.randrange(len(entries))
        match chance.randrange(10):
            case 0:
                entries[place] = fuzzer.message(recording_pb2.RecordingEntry)
            case 1:
                entries.insert(place, chance.choice(entries))
            case 2:
                del entries[place]
            case _:
                entries[place] = fuzzer.mutated(entries[place])
    file = io.BytesIO()
    for entry in entries:
        serialize_length_prefixed(entry, file)
    return fuzzer.damaged(file.getvalue()) if chance.random() < 0.1 else file.getvalue()


def replay_changed(directory: Path, capsys: pytest.CaptureFixture[str], seed: int, count: int) -> Counter[str]:
    (directory / "records").mkdir()
    entries, fuzzer, outcomes = recorded(directory / "records"), Fuzzer(seed), Counter[str]()
    file = directory / "changed"
    capsys.readouterr()
    for _ in range(count):
        file.write_bytes(changed(entries, fuzzer))
        try:
            code = replay([str(file), "--json"])
        except SystemExit as refused:
            code = refused.code
        said = capsys.readouterr()
        outcomes[{0: "as recorded", 1: "differs or fails", 2: "refused"}[code]] += 1
        if code == 2:
            assert said.err.startswith(("paged replay: ", "paged-executor: ")), said
        else:
            assert said.out.startswith("{"), said
    return outcomes


@pytest.fixture(autouse=True)
def _flags_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time would go by in that."""
    parsed: dict[tuple[str, ...], ExecutorSettings] = {}

    def parse_once(flags: list[str]) -> ExecutorSettings:
        if tuple(flags) not in parsed:
            parsed[tuple(flags)] = parse(flags)
        return parsed[tuple(flags)]

    monkeypatch.setattr("executor_svc.replay.__main__.parse", parse_once)


def test_a_recording_that_was_changed_is_replayed_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = replay_changed(tmp_path, capsys, 1, 300)
    assert min(outcomes.values()) > 10
    assert len(outcomes) == 3


def test_a_recording_whose_steps_have_no_room_for_a_token_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records").mkdir()
    entries, file = recorded(tmp_path / "records"), io.BytesIO()
    entries[0].header.tokens_per_step = 0
    for entry in entries:
        serialize_length_prefixed(entry, file)
    (tmp_path / "changed").write_bytes(file.getvalue())
    assert replay([str(tmp_path / "changed")]) == 2
    assert "tokens_per_step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_recording_that_was_changed_is_replayed_or_refused_for_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = replay_changed(tmp_path, capsys, 2, 10_000)
    with capsys.disabled():
        print(f"fuzzing, recordings: {outcomes.total()}, {dict(outcomes)}")
    assert outcomes.total() == 10_000
