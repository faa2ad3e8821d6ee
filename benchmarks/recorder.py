"""What the flight recorder costs a step: the executor's work for the same decode steps, with and without it, in turn.

Plans are taken into a resident batch, computed by the simulated runner, and answered, as the service does it; nothing
is sent. The cost is the difference of whole runs, so keyframes and what they make slower are in it; its share is of a
step of 5 ms. Beside it, how long writing a file takes, which is work of a fault and not of a step.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from executor_svc.batch import ResidentBatch
from executor_svc.intake import Intake
from executor_svc.leases import Ownership
from executor_svc.loaded import LoadedModel
from executor_svc.plan_checks import Limits
from executor_svc.recording import Taken, make_recorder
from executor_svc.results import asked_logprobs, fill_results
from executor_svc.settings import ExecutorSettings
from executor_svc.simulated.load import load_simulated
from executor_svc.stepper import Stepper
from paged.v1 import executor_pb2

STEP_US = 5000.0
PROMPT_TOKENS = 64
SESSION = 1


class Steps:
    """Decode steps of `num_rows` rows, one after another."""

    def __init__(self, settings: ExecutorSettings, model: LoadedModel, num_rows: int) -> None:
        facts = model.facts
        self._block_size = facts.block_size
        ownership = Ownership(settings.max_rows, model.num_blocks, settings.tokens_per_step)
        limits = Limits(facts.vocab_size, facts.max_model_len, facts.block_size)
        self._batch = ResidentBatch(ownership, limits)
        self._stepper = Stepper(self._batch, model.runner)
        self._intake = Intake(self._batch, SESSION)
        self._recorder = make_recorder(settings, model, self._batch, ownership, lambda: ("benchmark", 1))
        ownership.lend(SESSION, ownership.choose(ownership.most))
        self._rows = np.arange(num_rows, dtype=np.int32)
        self._next_block = 1
        self._length = PROMPT_TOKENS
        self._num_steps = 0
        self._run(self._first_plan())

    def decode(self, count: int) -> float:
        """Seconds that the executor's own work on so many steps took."""
        return sum(self._run(self._next_plan()) for _ in range(count))

    def write(self) -> float:
        """Seconds that a file takes."""
        begin = time.perf_counter()
        self._recorder.write("benchmark", wait=True)
        return time.perf_counter() - begin

    def _run(self, plan: executor_pb2.StepPlan) -> float:
        begin = time.perf_counter()
        self._recorder.before_step(self._intake.settle)
        applied = self._intake.take(plan)
        self._recorder.begin([Taken(SESSION, plan, applied)])
        output = self._stepper.run([applied])
        message = executor_pb2.ToScheduler()
        fill_results([applied], asked_logprobs(self._batch, [applied]), output, [message.result])
        self._recorder.end(output, [message.result])
        message.SerializeToString()
        self._intake.prepare()
        return time.perf_counter() - begin

    def _first_plan(self) -> executor_pb2.StepPlan:
        chance = np.random.default_rng(0)
        num_blocks = -(-PROMPT_TOKENS // self._block_size)
        plan = self._plan(PROMPT_TOKENS)
        for row in self._rows.tolist():
            plan.started.add(
                row=row,
                token_ids=chance.integers(300, 30_000, PROMPT_TOKENS, dtype=np.int32).tobytes(),
                num_prompt_tokens=PROMPT_TOKENS,
                blocks=self._blocks(num_blocks),
                sampling=executor_pb2.RowSampling(top_p=1.0, repetition_penalty=1.0),
            )
        return plan

    def _next_plan(self) -> executor_pb2.StepPlan:
        plan = self._plan(1)
        if self._length % self._block_size == 0:
            plan.appended_rows = self._rows.tobytes()
            plan.appended_blocks = self._blocks(len(self._rows))
        self._length += 1
        return plan

    def _plan(self, num_tokens: int) -> executor_pb2.StepPlan:
        """As the scheduler encodes it: it arrives as bytes."""
        self._num_steps += 1
        return executor_pb2.StepPlan(
            epoch=1,
            session=SESSION,
            step=self._num_steps,
            scheduled_rows=self._rows.tobytes(),
            scheduled_tokens=np.full(len(self._rows), num_tokens, np.int32).tobytes(),
            scheduled_samples=b"\1" * len(self._rows),
        )

    def _blocks(self, count: int) -> bytes:
        self._next_block += count
        return np.arange(self._next_block - count, self._next_block, dtype=np.int32).tobytes()


def measure(num_rows: int, rounds: int, steps: int) -> dict[str, float]:
    """µs a step without the recorder, what it adds without ids and with them, as shares of 5 ms, and ms of a file."""
    with tempfile.TemporaryDirectory() as name:
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "recorded": {"record_dir": Path(name)},
            "with_ids": {"record_dir": Path(name), "record_token_ids": True},
        }
        runs = {kind: _steps(num_rows, rounds * steps, flags) for kind, flags in kinds.items()}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, run in runs.items():
                times[kind].append(1e6 * run.decode(steps) / steps)
        adds = {
            kind: median(a - b for a, b in zip(times[kind], times["plain"], strict=True))
            for kind in ("recorded", "with_ids")
        }
        return {
            "rows": num_rows,
            "plain_us": round(median(times["plain"]), 1),
            "recorder_us": round(adds["recorded"], 1),
            "recorder_share": round(adds["recorded"] / STEP_US, 4),
            "with_ids_us": round(adds["with_ids"], 1),
            "with_ids_share": round(adds["with_ids"] / STEP_US, 4),
            "file_ms": round(1e3 * runs["with_ids"].write(), 1),
        }


def _steps(num_rows: int, num_steps: int, flags: dict[str, Any]) -> Steps:
    length = PROMPT_TOKENS + num_steps + 1
    settings = ExecutorSettings(
        simulate=True,
        max_rows=num_rows,
        tokens_per_step=num_rows * PROMPT_TOKENS + 1,
        num_blocks=num_rows * (length // 16 + 2) + 1,
        simulate_max_model_len=length + 1,
        **flags,
    )
    return Steps(settings, load_simulated(settings), num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=512, help="a multiple of 256 has whole keyframes in each round")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    found = measure(arguments.rows, arguments.rounds, arguments.steps)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>16}  {value}")


if __name__ == "__main__":
    main()
