"""Replays a recording on an executor's runner, in this process, and compares.

Usage: python -m executor_svc.replay FILE [--json] [flags of paged-executor]

The simulated model is used for a recording of it; for any other one --model is needed. Sizes of the pool and of steps
are the recording's. Exit codes: 0 where all is as recorded, 1 where something differs or cannot be replayed, 2 for bad
flags or a file that cannot be read.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from executor_svc import logs
from executor_svc.loaded import LoadedModel
from executor_svc.model_loading import load_model
from executor_svc.plan import PlanViolation
from executor_svc.ranks import Ranks
from executor_svc.recording.files import UnreadableRecording, read_recording
from executor_svc.replay.comparison import Comparison
from executor_svc.replay.ids import RandomIds, RecordedIds
from executor_svc.replay.player import SPARE_ROWS, Player
from executor_svc.settings import ExecutorSettings, parse, refuse
from executor_svc.stepper import RunnerFailed
from paged.v1 import recording_pb2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="paged replay", description="Replay a recording, and compare.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="Print one JSON line instead of a text.")
    own, flags = parser.parse_known_args(arguments)
    try:
        header, entries = read_recording(own.file)
        settings = _settings(own.file, header, flags)
        model = load_model(settings, Ranks.of_environment({}))
        try:
            summary = _replay(own.file, header, entries, model)
        finally:
            model.close()
    except UnreadableRecording as error:
        print(f"paged replay: {error}", file=sys.stderr)
        return 2
    print(json.dumps(summary) if own.json else _text(header, summary))
    return 0 if summary["as_recorded"] else 1


def _settings(file: Path, header: recording_pb2.RecordingHeader, flags: list[str]) -> ExecutorSettings:
    facts = header.model
    if facts.architecture == "simulated" and not {"--simulate", "--model"} & set(flags):
        flags = ["--simulate", "--simulate-vocab-size", str(facts.vocab_size), *flags]
        flags += ["--simulate-max-model-len", str(facts.max_model_len)]
        if facts.eos_token_ids:
            flags += ["--simulate-eos-id", str(facts.eos_token_ids[0])]
    settings = parse(flags)
    if not header.tokens_per_step:
        raise UnreadableRecording(f"{file}: is damaged: tokens_per_step of its header is 0")
    max_rows = header.max_rows + SPARE_ROWS
    sizes = {
        "block_size": facts.block_size,
        "num_blocks": header.num_blocks,
        "kv_memory": None,
        "max_rows": max_rows,
        "tokens_per_step": max(header.tokens_per_step, max_rows + 1),
        "max_model_len": facts.max_model_len,
    }
    try:
        return ExecutorSettings.model_validate({**settings.model_dump(), **sizes})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "sizes"
        raise UnreadableRecording(f"{file}: is damaged: {where} of its header: {problem['msg']}") from error


def _replay(
    file: Path,
    header: recording_pb2.RecordingHeader,
    entries: Iterator[recording_pb2.RecordingEntry],
    model: LoadedModel,
) -> dict[str, object]:
    facts, recorded = model.facts, header.model
    if (facts.vocab_size, facts.block_size) != (recorded.vocab_size, recorded.block_size):
        due = f"a vocabulary of {recorded.vocab_size} and blocks of {recorded.block_size}"
        refuse(f"the recording needs {due}; the model has {facts.vocab_size} and {facts.block_size}")
    same_weights = facts.fingerprint == recorded.fingerprint
    comparison = Comparison(with_values=header.has_token_ids and same_weights)
    ids = RecordedIds() if header.has_token_ids else RandomIds(facts.vocab_size)
    player, last, end = Player(header, model.runner, ids), None, ""
    for entry in entries:
        last = entry
        begin = time.perf_counter()
        try:
            played = player.play(entry)
            if played is not None:
                comparison.note(played, round(1e6 * (time.perf_counter() - begin)))
        except (RunnerFailed, PlanViolation) as failure:
            end = f"{failure.__cause__ or failure}"
            break
        except (ValueError, LookupError, OverflowError) as error:  # no recorder has written that
            kind = entry.WhichOneof("entry") or "entry"
            raise UnreadableRecording(f"{file}: is damaged: a {kind} cannot be played: {error!r}") from error
    at_fault = last is not None and _is_fault(last)
    return {
        "reason": header.reason,
        "same_weights": same_weights,
        **comparison.summary(),
        "failed": end or None,
        "fault_came_again": bool(end) if at_fault else None,
        "as_recorded": not comparison.differing and bool(end) <= at_fault,
    }


def _is_fault(entry: recording_pb2.RecordingEntry) -> bool:
    """Whether it is what the recording was written for: a step that did not end, or a plan that was refused."""
    if entry.HasField("step"):
        return not all(merged.HasField("result") for merged in entry.step.plans)
    return entry.HasField("refused_plan")


def _text(header: recording_pb2.RecordingHeader, summary: dict[str, object]) -> str:
    lines = [f"Recording of {header.model.name} for: {header.reason}"]
    lines += [f"{name}: {'-' if value is None else value}" for name, value in summary.items() if name != "reason"]
    return "\n".join(lines)


if __name__ == "__main__":
    logs.configure("warning", "console")
    sys.exit(main())
