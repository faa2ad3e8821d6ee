"""Decode steps in fixed buffers, padded to the next size of a ladder, give what steps of their own size give."""

import itertools
import math

import pytest
import torch
import transformers

from executor_svc.model.cuda_graphs import RecordingNotEnded, record_graphs
from executor_svc.model.decode_graphs import MIN_SAVED_BLOCKS, ladder, recordings
from executor_svc.model.refusal import ModelRefused
from tests.model.conftest import BLOCK_SIZE, MAX_ROWS, Model, random_ids
from tests.model.driver import Driver, row_sampling
from tests.model.test_margin import assert_margin, drawn, greedy
from tests.tiny_models import TINY_DECODER, save_model

CPU = torch.device("cpu")
NUM_OUTPUTS = 14
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}


class Replayed:
    """A model whose decode steps go through fixed buffers; nothing is recorded on a CPU, the work is done anew.

    Before each step, what the step must not read is filled with garbage.
    """

    def __init__(self, loaded):
        self.runner, self.sizes, self.shared = loaded.runner, [], []
        remaining = recordings(MAX_ROWS)[::-1]

        def recorder(work):
            size, shares = remaining.pop()
            work()
            return lambda: self._replay(size, shares, work)

        self.runner.record_graphs(recorder, table_width=-(-loaded.facts.max_model_len // BLOCK_SIZE))
        self.graphs, self.runner.graphs = self.runner.graphs, None

    def _replay(self, size, shares, work):
        self.sizes.append(size)
        self.shared += [size] if shares else []
        for first, second in self.runner._memory.layers:
            first[0], second[0] = math.nan, math.inf  # block 0: only padding may look there, after it has written
        work()

    def __enter__(self):
        self.runner.graphs = self.graphs
        return self

    def __exit__(self, *_):
        self.runner.graphs = None


def generate(loaded) -> list:
    """Rows that begin one after another, a fork, penalties and draws: batches of many sizes."""
    driver = Driver(loaded, MAX_ROWS)
    sequences = [greedy(random_ids(i, 3 * i + 1)) for i in range(4)]
    sequences += [drawn(random_ids(8, 18), seed=5, **PENALTIES), drawn(random_ids(3, 11), seed=11)]
    rows = []
    for sequence in sequences:
        rows.append(driver.start(sequence))
        driver.step(chunk=7)
        driver.step(chunk=7)
    child = driver.fork(rows[3], row_sampling(logprobs=4))
    sequences.append(driver.sequences[child])
    sequences[-1].logprobs = list(sequences[3].logprobs)
    driver.run([*rows, child], NUM_OUTPUTS, chunk=7)
    return sequences


def test_padded_steps_are_within_the_margin_and_as_those_of_their_own_size(model):
    expected = generate(model.loaded)
    for cache in model.loaded.runner._memory.tensors:
        cache.fill_(math.nan)
    with Replayed(model.loaded) as replayed:
        sequences = generate(model.loaded)
    assert {1, 2, 4, 8} <= set(replayed.sizes)
    for sequence, other in zip(sequences, expected, strict=True):
        assert sequence.token_ids == other.token_ids
        for (ids, values, rank), (other_ids, other_values, other_rank) in zip(
            sequence.logprobs, other.logprobs, strict=True
        ):
            assert (ids, rank) == (other_ids, other_rank)
            assert values == pytest.approx(other_values, abs=1e-5)
    assert_margin(model, *sequences, num_outputs=NUM_OUTPUTS)


def test_entries_past_a_rows_blocks_may_be_anything(llama):
    outputs = []
    for garbage in (0, 599):
        with Replayed(llama.loaded) as replayed:
            replayed.graphs._columns["block_tables"].fill_(garbage)
            sequences = [greedy(random_ids(i, 2 + 5 * i)) for i in range(3)]
            Driver(llama.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS)
        outputs.append([(sequence.outputs, sequence.logprobs) for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert replayed.sizes


def test_rows_that_are_none_write_and_see_slot_0_alone(llama):
    caches = llama.loaded.runner._memory.tensors
    for cache in caches:
        cache.fill_(math.nan)
    driver, sequences = Driver(llama.loaded, MAX_ROWS), [greedy(random_ids(i, 6)) for i in range(5)]
    with Replayed(llama.loaded) as replayed:
        driver.generate([greedy(random_ids(9, 40)) for _ in range(8)], 3)  # leaves other rows in the fixed buffers
        rows = [driver.start(sequence) for sequence in sequences]
        driver.step()
        driver.step()
    assert replayed.sizes[-1] == 8
    columns = replayed.graphs._columns
    assert columns["slots"][5:8].tolist() == columns["positions"][5:8].tolist() == [0, 0, 0]
    assert columns["context_lens"][5:8].tolist() == [1, 1, 1]
    assert columns["block_tables"][5:8, 0].tolist() == [0, 0, 0]
    # Each row owns its last block alone, and wrote no further than its last token.
    for row in rows:
        block, used = driver.sequences[row].table[-1], driver.sequences[row].num_computed % BLOCK_SIZE
        assert all(cache[block, used:].isnan().all() for cache in caches)


def test_only_steps_of_single_tokens_that_all_sample_are_replayed(llama):
    driver = Driver(llama.loaded, MAX_ROWS)
    with Replayed(llama.loaded) as replayed:
        rows = [driver.start(greedy(random_ids(i, 6))) for i in range(3)]
        driver.step(chunk=1, rows=rows[:2])  # single tokens, but none samples
        driver.step(rows=rows[:2])  # prompts
        assert replayed.sizes == []
        driver.step(rows=rows[:2])
        assert replayed.sizes == [2]
        driver.step(rows=[rows[0], rows[2]])  # a prompt beside a row that decodes
        assert replayed.sizes == [2]
        driver.step()
        driver.step(rows=rows[1:2])
        assert replayed.sizes == [2, 4, 1]


def test_a_prompts_last_token_alone_is_replayed_with_its_own_id(model):
    prompt, others = random_ids(4, BLOCK_SIZE + 1), [greedy(random_ids(5, 9)) for _ in range(2)]
    first, second = greedy(prompt), greedy(prompt)
    driver = Driver(model.loaded, MAX_ROWS)
    rows = [driver.start(sequence) for sequence in (first, *others)]
    driver.step()
    with Replayed(model.loaded) as replayed:
        rows.append(driver.start(second, shared_from=first, num_shared=BLOCK_SIZE))
        driver.step()
        assert replayed.sizes == [4]
        driver.run(rows, NUM_OUTPUTS)
    assert second.outputs == first.outputs
    assert_margin(model, first, second, *others, num_outputs=NUM_OUTPUTS)


def generate_sharing(loaded, num_rows: int) -> list:
    """Rows with a prefix of 6 blocks in common, and each with what those after it have besides, up to two blocks."""
    driver = Driver(loaded, MAX_ROWS, min_saved_tokens=1)
    prefix = random_ids(1, 6 * BLOCK_SIZE)
    sequences, rows = [], []
    for i in range(num_rows):
        before = sequences[-1] if sequences else None
        num_shared = (6 + 2 * i) * BLOCK_SIZE if i < 3 else 6 * BLOCK_SIZE
        ids = prefix if before is None else (before.token_ids[:num_shared] if i < 3 else prefix)
        sequences.append(greedy(ids + random_ids(i + 2, 2 * BLOCK_SIZE + 1)))
        rows.append(driver.start(sequences[-1], shared_from=before, num_shared=num_shared if before else 0))
        driver.step(rows=rows[-1:])
    driver.run(rows, NUM_OUTPUTS)
    return sequences


@pytest.mark.parametrize(("num_rows", "sizes"), [(2, {4}), (3, {4}), (5, {8}), (9, {16})])
def test_rows_that_share_are_replayed_with_what_they_share(model, num_rows, sizes):
    """Where little is saved, as steps that share nothing."""
    expected = generate_sharing(model.loaded, num_rows)
    for least in (4, MIN_SAVED_BLOCKS):
        with Replayed(model.loaded) as replayed:
            replayed.graphs.min_saved_blocks = least
            for name, column in replayed.graphs._columns.items():
                if name.startswith("shared"):
                    column.fill_(2**31 - 1)
            sequences = generate_sharing(model.loaded, num_rows)
        assert [sequence.token_ids for sequence in sequences] == [sequence.token_ids for sequence in expected]
        assert sizes <= set(replayed.shared) if least == 4 else replayed.shared == []
    assert_margin(model, *sequences, num_outputs=NUM_OUTPUTS)


def test_a_step_of_more_segments_than_are_recorded_is_replayed_without(llama):
    """Four rows, of which the first three have more in common, and of these two still more: three segments."""
    driver, common = Driver(llama.loaded, MAX_ROWS, min_saved_tokens=1), random_ids(1, 20 * BLOCK_SIZE)
    first = greedy(common)
    rows = [driver.start(first)]
    driver.step()
    with Replayed(llama.loaded) as replayed:
        replayed.graphs.min_saved_blocks = 4
        for num_blocks in (6, 10, 14):
            other = greedy(common[: num_blocks * BLOCK_SIZE] + random_ids(num_blocks, 2))
            rows.append(driver.start(other, shared_from=first, num_shared=num_blocks * BLOCK_SIZE))
            driver.step()  # a prompt, and rows that decode beside it: not replayed
        assert replayed.sizes == []
        driver.step()
        assert (replayed.sizes, replayed.shared) == ([4], [])
        driver.end(rows.pop())
        driver.step()
    assert (replayed.sizes, replayed.shared) == ([4, 4], [4])


def test_long_and_short_rows_are_replayed_with_the_factors_of_each(tmp_path):
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8,
    }  # fmt: skip
    model = Model(save_model(tmp_path, transformers.LlamaConfig(**TINY_DECODER, rope_parameters=rope)))
    sequences = [greedy(random_ids(length, length)) for length in (4, 33, 16, 60, 9)]
    with Replayed(model.loaded) as replayed:
        Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS)
    assert set(replayed.sizes) == {8}
    assert_margin(model, *sequences, num_outputs=NUM_OUTPUTS)


def test_a_model_that_cannot_be_recorded_is_served_without_and_one_warning_says_why(llama, capsys):
    runner, recorded = llama.loaded.runner, []

    def recorder(work):
        recorded.append(work)
        if len(recorded) > 2:
            raise RuntimeError("called a synchronizing CUDA operation\nwith a trace")
        return work

    record_graphs(runner, CPU, 64, recorder)
    assert runner.graphs is None
    said = capsys.readouterr().out
    assert said.count("decode_not_recorded") == 1
    assert "RuntimeError: called a synchronizing CUDA operation" in said
    sequence = greedy(random_ids(1, 9))
    Driver(llama.loaded, MAX_ROWS).generate([sequence], NUM_OUTPUTS)
    assert_margin(llama, sequence, num_outputs=NUM_OUTPUTS)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("tried"), "recording decode steps: .* are available on cpu; set cuda_graphs to false"),
        (RecordingNotEnded("invalidated"), "left cpu unusable .*invalidated.*set cuda_graphs to false"),
    ],
    ids=["out of memory", "not ended"],
)
def test_a_recording_that_takes_too_much_or_leaves_harm_is_refused(llama, error, sentence):
    def recorder(work):
        raise error

    with pytest.raises(ModelRefused, match=sentence):
        record_graphs(llama.loaded.runner, CPU, 64, recorder)
    assert llama.loaded.runner.graphs is None


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 24, 31, 33, 100, 256, 1000, 65536])
def test_the_ladder_is_short_and_wastes_little(max_rows):
    sizes = ladder(max_rows)
    assert sizes[-1] == max_rows
    assert sizes == sorted(set(sizes))
    assert {size for size in (1, 2, 4, 8, 16, 24, 32) if size <= max_rows} <= set(sizes)
    assert len(sizes) <= 8 + 4 * max_rows.bit_length()
    for smaller, larger in itertools.pairwise(sizes):
        assert larger <= 2 * smaller
        assert smaller < 16 or larger <= 1.5 * smaller
    recorded = recordings(max_rows)
    assert recorded[0][0] == max_rows
    assert sorted(size for size, shares in recorded if not shares) == sizes
    assert len(recorded) - len(sizes) <= 1 + max_rows.bit_length()
