"""The simulated runner says exactly what the oracle says, and any wrong block changes it or raises."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from executor_svc.simulated.launched import LaunchedStep
from executor_svc.simulated.runner import Latency, SimulatedFailure, SimulatedRunner
from executor_svc.simulated.script import Reply, Script, ScriptedFault, ScriptError, read_script
from executor_svc.simulated.text import SimulatedText, simulated_continuation
from executor_svc.step import RowStart, Step, StepOutput
from executor_svc.token_rules import read_rules
from paged.v1.executor_pb2 import RowSampling
from tests.executor.plans import sampling
from tests.rules import rule_columns

B = 4
VOCAB = 1000


def make_runner(script: Script | None = None, latency: Latency | None = None) -> SimulatedRunner:
    return SimulatedRunner(num_rows=8, num_blocks=32, block_size=B, vocab_size=VOCAB, script=script, latency=latency)


class Rows:
    """Drives a runner directly, so that a test may hand it wrong tables."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self.runner = runner
        self.ids: dict[int, list[int]] = {}  # -1 for sampled ones
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def start(
        self,
        row: int,
        ids: Sequence[int],
        table: Sequence[int],
        parameters: RowSampling | None = None,
        computed: int = 0,
    ) -> None:
        self.ids[row], self.tables[row], self.computed[row] = list(ids), list(table), computed
        start = RowStart(row, np.array(ids, np.int32), len(ids), parameters or sampling())
        self.runner.start_rows([start])

    def fork(self, parent: int, child: int, parameters: RowSampling) -> None:
        self.ids[child], self.tables[child] = list(self.ids[parent]), list(self.tables[parent])
        self.computed[child] = self.computed[parent]
        self.runner.fork_rows(np.array([parent], np.int32), np.array([child], np.int32), [parameters])

    def run(self, *work: tuple[int, int, bool], copies: Sequence[tuple[int, int]] = ()) -> StepOutput:
        """(row, tokens, samples) of each row; copies of (source, destination)."""
        return self.launch(*work, copies=copies).result()

    def launch(self, *work: tuple[int, int, bool], copies: Sequence[tuple[int, int]] = ()) -> LaunchedStep:
        ids, positions, slots, contexts = [], [], [], []
        for row, count, samples in work:
            begin = self.computed[row]
            ids += self.ids[row][begin : begin + count]
            positions += range(begin, begin + count)
            slots += [self.tables[row][p // B] * B + p % B for p in range(begin, begin + count)]
            self.computed[row] = begin + count
            contexts.append(begin + count)
            self.ids[row] += [-1] if samples else []
        width = max((len(self.tables[row]) for row, _, _ in work), default=0)
        tables = [self.tables[row] + [0] * (width - len(self.tables[row])) for row, _, _ in work]
        starts = np.cumsum([0, *(count for _, count, _ in work)])
        return self.runner.launch(
            Step(
                rows=np.array([row for row, _, _ in work], np.int32),
                query_start=starts.astype(np.int32),
                token_ids=np.array(ids, np.int32),
                positions=np.array(positions, np.int32),
                slots=np.array(slots, np.int64),
                block_tables=np.array(tables, np.int32).reshape(len(work), width),
                context_lens=np.array(contexts, np.int32),
                samples=np.array([samples for _, _, samples in work], np.bool_),
                copy_sources=np.array([source for source, _ in copies], np.int32),
                copy_destinations=np.array([destination for _, destination in copies], np.int32),
            )
        )

    def decode(self, row: int, count: int) -> list[int]:
        return [int(self.run((row, 1, True)).sampled_ids[0]) for _ in range(count)]


def say(ids: Sequence[int], count: int, **parameters: object) -> list[int]:
    return simulated_continuation(ids, count, vocab_size=VOCAB, **parameters)  # type: ignore[arg-type]


@pytest.fixture
def rows() -> Rows:
    return Rows(make_runner())


PROMPT = [5, 17, 999, 0, 3, 3]


def test_a_row_says_what_the_oracle_says_whatever_its_blocks(rows: Rows) -> None:
    rows.start(2, PROMPT, [30, 1, 9, 4])
    first = int(rows.run((2, 6, True)).sampled_ids[0])
    assert [first, *rows.decode(2, 9)] == say(PROMPT, 10)


def test_chunks_and_company_do_not_change_the_text(rows: Rows) -> None:
    rows.start(0, PROMPT, [1, 2, 3])
    rows.start(1, [8], [4, 5, 6])
    assert rows.run((0, 1, False), (1, 1, True)).sampled_ids.tolist() == say([8], 1)
    assert rows.run((1, 1, True), (0, 4, False)).sampled_ids.tolist() == say([8], 2)[1:]
    both = rows.run((0, 1, True), (1, 1, True)).sampled_ids.tolist()
    assert both == say(PROMPT, 1) + say([8], 3)[2:]


def test_every_position_of_the_context_counts() -> None:
    texts = {tuple(say([*PROMPT[:i], 500, *PROMPT[i + 1 :]], 4)) for i in range(len(PROMPT))}
    texts.add(tuple(say(PROMPT, 4)))
    texts.add(tuple(say([*PROMPT, 0], 4)))
    texts.add(tuple(say([0, *PROMPT], 4)))
    assert len(texts) == len(PROMPT) + 3


def test_seed_and_index_count_only_with_a_temperature(rows: Rows) -> None:
    drawn = say(PROMPT, 8, temperature=0.7, seed=2**64 - 1, index=3)
    assert drawn != say(PROMPT, 8, temperature=0.7, seed=2**64 - 1, index=4)
    assert drawn != say(PROMPT, 8, temperature=0.7, seed=1, index=3)
    assert say(PROMPT, 8, seed=1) == say(PROMPT, 8, seed=2)
    rows.start(0, PROMPT, [1, 2, 3, 4], sampling(temperature=0.7, seed=2**64 - 1, index=3))
    assert [int(rows.run((0, 6, True)).sampled_ids[0]), *rows.decode(0, 7)] == drawn


def test_a_wrong_block_in_the_table_changes_the_text(rows: Rows) -> None:
    rows.start(0, PROMPT, [1, 2, 3])
    rows.start(1, [7] * 6, [4, 5, 6])
    rows.run((0, 6, True), (1, 6, True))
    rows.tables[0][0] = 4
    assert rows.decode(0, 1) != say(PROMPT, 2)[1:]


def test_reading_a_slot_that_was_never_written_raises(rows: Rows) -> None:
    rows.start(0, PROMPT, [1, 2, 3], computed=4)  # says that block 1 is computed; nobody has
    with pytest.raises(SimulatedFailure, match="row 0 with a context of 6: slot 4 of position 0 was never written"):
        rows.run((0, 2, True))


def test_a_stale_block_of_an_ended_row_changes_the_text(rows: Rows) -> None:
    rows.start(0, [9] * 4, [1])
    rows.run((0, 4, False))
    rows.start(0, PROMPT, [1, 2], computed=4)
    assert rows.run((0, 2, True)).sampled_ids.tolist() != say(PROMPT, 1)


def forked(rows: Rows, *, copy: bool) -> tuple[list[int], list[int]]:
    """What two draws of one prompt say when they part in the partly filled last block."""
    rows.start(0, PROMPT, [1, 2, 3], sampling(temperature=1, seed=4, index=0))
    rows.run((0, 5, False))
    rows.fork(0, 1, sampling(temperature=1, seed=4, index=1))
    first = rows.run((0, 1, True), (1, 1, True)).sampled_ids.tolist()
    if copy:
        rows.tables[1][1:] = [7, 8]
    second = rows.run((0, 1, True), (1, 1, True), copies=[(2, 7)] if copy else []).sampled_ids.tolist()
    return [first[0], second[0]], [first[1], second[1]]


def test_forks_part_after_a_copy_and_not_without_it() -> None:
    expected = tuple(say(PROMPT, 2, temperature=1, seed=4, index=index) for index in (0, 1))
    assert forked(Rows(make_runner()), copy=True) == expected
    assert forked(Rows(make_runner()), copy=False) != expected


def test_copies_happen_before_the_steps_writes(rows: Rows) -> None:
    rows.start(0, PROMPT[:4], [1])
    rows.run((0, 4, False))
    rows.start(1, [*PROMPT[:4], 50], [9, 10], computed=4)
    rows.start(2, [6, 6, 6, 6], [1])  # writes over the source in the same step
    assert rows.run((1, 1, True), (2, 4, True), copies=[(1, 9)]).sampled_ids.tolist() == [
        *say([*PROMPT[:4], 50], 1),
        *say([6, 6, 6, 6], 1),
    ]


def test_a_step_of_copies_alone_runs(rows: Rows) -> None:
    rows.start(0, PROMPT[:4], [1])
    rows.run((0, 4, False))
    assert len(rows.run(copies=[(1, 9)]).sampled_ids) == 0
    rows.start(1, PROMPT, [9, 10], computed=4)
    assert rows.run((1, 2, True)).sampled_ids.tolist() == say(PROMPT, 1)


def test_a_sampled_token_that_was_never_sampled_raises(rows: Rows) -> None:
    rows.start(0, [1, -1], [1])
    with pytest.raises(SimulatedFailure, match="before one was sampled"):
        rows.run((0, 2, True))


def test_end_tokens_are_passed_over_before_min_tokens(rows: Rows) -> None:
    plain = say(PROMPT, 5)
    held = say(PROMPT, 5, min_tokens=3, end_token_ids=[plain[0], (plain[0] + 1) % VOCAB])
    assert held[0] == (plain[0] + 2) % VOCAB
    assert say(PROMPT, 5, end_token_ids=[plain[2]]) == plain[:3]
    parameters = sampling(min_tokens=3, end_token_ids=[plain[0], (plain[0] + 1) % VOCAB])
    rows.start(0, PROMPT, [1, 2, 3], parameters)
    assert int(rows.run((0, 6, True)).sampled_ids[0]) == held[0]


def test_logprobs_are_the_documented_function_of_hash_and_id(rows: Rows) -> None:
    rows.start(0, PROMPT, [1, 2], sampling(logprobs=2))
    rows.start(1, [8], [3])
    rows.start(2, [9], [4], sampling(logprobs=0))
    logprobs = rows.run((0, 6, True), (1, 1, True), (2, 1, True)).logprobs
    text, short = SimulatedText(PROMPT, vocab_size=VOCAB), SimulatedText([9], vocab_size=VOCAB)
    u, v = (text.context_hash() >> 48) / 65536, (short.context_hash() >> 48) / 65536
    token, other = text.next_token(), short.next_token()
    assert logprobs is not None
    assert logprobs.ids.tolist() == [token, token, (token + 1) % VOCAB, other]
    assert logprobs.values.tolist() == [-u, -u, -(1 + u), -v]
    assert logprobs.values.dtype == np.float32
    assert logprobs.ranks.tolist() == [1, 1]


def test_rules_choose_the_nearest_id_up_that_they_leave(rows: Rows) -> None:
    (best,) = say(PROMPT, 1)
    for row, (rules, expected) in enumerate(
        [
            ({"banned": [[best], [PROMPT[-1], best + 1], [0, PROMPT[-1], best + 2]]}, best + 2),
            ({"allowed": [best - 1, best - 5, best + 30]}, best + 30),
            ({"bias": {best + 30: 30.5}}, best + 30),
            ({"bias": {best + 30: 29.5, best: -0.25}}, best),
            ({"bias": {best: -3.5}}, best + 1),
            ({"allowed": [best], "banned": [[best]]}, -1),
        ]
    ):
        rows.start(row, PROMPT, [1, 2], sampling(**rule_columns(**rules)))
        assert rows.run((row, 6, True)).sampled_ids.tolist() == [expected]


def test_rules_last_as_long_as_their_row_and_are_the_childs_own(rows: Rows) -> None:
    rules = rule_columns(allowed=range(100), banned=[[i, j] for i in range(0, 100, 7) for j in (5, 6)])
    rows.start(0, PROMPT, [1, 2, 3], sampling(**rules))
    said = rows.run((0, 6, True)).sampled_ids.tolist() + rows.decode(0, 5)
    assert said == say(PROMPT, 6, rules=read_rules(sampling(**rules)))
    rows.fork(0, 1, sampling())
    rows.runner.end_rows(np.array([0], np.int32))
    rows.start(0, PROMPT, [4, 5, 6])
    assert rows.run((1, 1, True), (0, 6, True)).sampled_ids.tolist() == [say([*PROMPT, *said], 1)[0], *say(PROMPT, 1)]


def test_reset_forgets_everything(rows: Rows) -> None:
    rows.start(0, PROMPT, [1, 2])
    rows.run((0, 6, True))
    rows.runner.reset()
    with pytest.raises(SimulatedFailure):
        rows.decode(0, 1)


def test_a_reply_is_said_before_the_hash_takes_over() -> None:
    rows = Rows(make_runner(Script(replies=(Reply(prompt=tuple(PROMPT), output=(1, 2, 3)),))))
    rows.start(0, PROMPT, [1, 2, 3])
    rows.start(1, PROMPT[:-1], [4, 5, 6])
    assert rows.run((0, 6, True), (1, 5, True)).sampled_ids.tolist() == [1, *say(PROMPT[:-1], 1)]
    said = [1, *rows.decode(0, 4)]
    assert said == say(PROMPT, 5, reply=[1, 2, 3])
    assert said[:3] == [1, 2, 3]


def test_scripted_faults_hit_their_step_or_their_prompt() -> None:
    poison, other = (1, 2, 3), (4,)
    script = Script(
        faults=(
            ScriptedFault(kind="raise", step=3),
            ScriptedFault(kind="not_finite", row_of_prompt=poison),
        )
    )
    rows = Rows(make_runner(script))
    rows.start(0, poison, [1, 2])
    rows.start(1, other, [3, 4])
    assert rows.run((0, 3, True), (1, 1, True)).sampled_ids.tolist() == [-1, *say(other, 1)]
    assert rows.run((1, 1, True)).sampled_ids.tolist() == say(other, 2)[1:]
    with pytest.raises(SimulatedFailure, match="step 3"):
        rows.run((1, 1, True))


def test_a_step_lasts_as_long_as_its_latency_says() -> None:
    rows = Rows(make_runner(latency=Latency(fixed_us=4000, per_token_us=500, per_context_token_ns=100_000)))
    rows.start(0, PROMPT, [1, 2])
    begin = time.perf_counter()
    rows.run((0, 6, True))
    assert time.perf_counter() - begin >= 4e-3 + 6 * 500e-6 + 6 * 100e-6


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "file"),
        ('{"faults": [{"kind": "raise"}]}', "faults.0"),
        ('{"faults": [{"kind": "melt", "step": 1}]}', "faults.0.kind"),
        ('{"replies": [{"prompt": [1], "output": [1000]}]}', "replies.0.output: id 1000 must be below 1000"),
        ('{"reply": []}', "reply"),
    ],
)
def test_a_bad_script_is_refused_with_the_place(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ScriptError, match=problem):
        read_script(path, VOCAB)


def test_what_is_asked_for_while_a_step_is_under_way_comes_after_it(rows: Rows) -> None:
    rows.start(0, PROMPT, [2, 5])
    rows.run((0, 6, True))
    launched = rows.launch((0, 1, True))
    rows.runner.end_rows(np.array([0], np.int32))
    rows.start(0, [7, 8], [2, 5])
    assert launched.result().sampled_ids.tolist() == say(PROMPT, 2)[1:]
    assert rows.run((0, 2, True)).sampled_ids.tolist() == say([7, 8], 1)
