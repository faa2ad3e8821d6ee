"""On paper: blocks hold what they promise, slabs what theirs do, and a clock goes on as steps cost."""

import pytest

from benchmarks.claims import samples
from benchmarks.claims.memory import saturated
from benchmarks.claims.paper import Paper, StepCosts, StepWork, paper_lease
from benchmarks.claims.requests import Mix, Poisson, Source, TraceError, drawn_mix, trace_mix
from benchmarks.claims.setting import KV_TOKENS, LONGEST, Setting
from benchmarks.claims.slabs import BEST_SLABS, POLICIES, PolicyMaker
from benchmarks.claims.throughput import ratio_error
from benchmarks.claims.watched import Occupancy
from paged.load.lengths import MIXES

MADE = {name: drawn_mix(name, LONGEST) for name in MIXES}


def _setting(*mixes: Mix) -> Setting:
    return Setting(
        mixes=mixes,
        vocab_size=1000,
        longest=LONGEST,
        kv_tokens=KV_TOKENS,
        window_s=0.0,
        num_plans=1200,
        quick=True,
        say=lambda text: None,
    )


def _occupancy(make: PolicyMaker, mix: str) -> Occupancy:
    return saturated(_setting(MADE[mix]), make(LONGEST), MADE[mix])[0]


def test_of_the_blocks_of_a_long_mix_96_percent_hold_tokens() -> None:
    assert _occupancy(POLICIES["paged"], "long").utilisation >= 0.96


def test_half_a_block_less_half_a_slot_of_a_short_sequence_is_empty() -> None:
    occupancy = _occupancy(POLICIES["paged"], "short")
    assert occupancy.utilisation == pytest.approx(occupancy.mean_tokens / (occupancy.mean_tokens + 7.5), abs=0.01)


def test_the_less_a_policy_knows_of_lengths_the_fewer_sequences_run() -> None:
    order = [POLICIES["slab_max"], POLICIES["slab_pow2"], POLICIES["slab_oracle"], BEST_SLABS, POLICIES["paged"]]
    for mix in MIXES:
        found = [_occupancy(make, mix) for make in order]
        running = [occupancy.running for occupancy in found]
        assert running == sorted(running)
        assert running[0] == KV_TOKENS / LONGEST
        if mix == "long":
            assert running[-1] > 3 * running[0]


def test_lengths_have_the_means_of_their_data_sets() -> None:
    for name, mix in MADE.items():
        assert (mix.mean_prompt, mix.mean_output) == pytest.approx(MIXES[name], rel=0.02)
        assert max(sum(pair) for pair in mix.lengths) <= LONGEST


def test_a_trace_is_read_in_order_and_cut_to_the_longest_sequence(tmp_path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrived,prompt_tokens,output_tokens\n0,10,20\n1,900,5\n2,30,900\n")
    assert trace_mix(file, 100).lengths == ((10, 20), (50, 5), (30, 70))


@pytest.mark.parametrize(
    "text", ["", "prompt_tokens,output_tokens\n", "prompt_tokens\n5\n", "prompt_tokens,output_tokens\n5,x\n",
             "prompt_tokens,output_tokens\n5,0\n"]
)  # fmt: skip
def test_a_trace_without_lengths_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(TraceError, match=r"trace\.csv"):
        trace_mix(tmp_path / "trace.csv", 100)
    with pytest.raises(TraceError, match="No such file"):
        trace_mix(tmp_path / "none.csv", 100)


def test_costs_of_steps_are_found_again_from_what_steps_took() -> None:
    costs = StepCosts(0.02, 0.001, 0.0005, 0.0)
    works = [StepWork(tokens, tokens % 7, 40 * tokens) for tokens in range(1, 60)]
    found = StepCosts.fitted(works, [costs.of(work) for work in works])
    for work in works:
        assert found.of(work) == pytest.approx(costs.of(work))


def test_a_lone_request_gets_its_tokens_when_its_steps_end() -> None:
    source = Source(Mix("one", ((3, 5),)), 100)
    paper = Paper(POLICIES["paged"](64), paper_lease(8, 2, 8, 16, 100), Poisson(source, 1e-6), StepCosts(0.5, 0.1))
    while not paper.meter.ended:
        paper.step()
    assert paper.meter.first_tokens_s == pytest.approx([0.5 + 0.3])
    assert paper.meter.gaps_s == pytest.approx([0.5 + 0.1] * 4)
    assert paper.num_computed == 3 + 4


def test_what_ran_on_paper_goes_on_elsewhere_with_its_tokens() -> None:
    scheduler = POLICIES["slab_oracle"](64)
    source = Source(Mix("one", ((10, 20),)), 100)
    scheduler.submit(sequence := source.next(0.0))
    first = Paper(scheduler, paper_lease(16, 2, 16, 16, 100), Poisson(source, 1e-9))
    first.steps(5)
    known = list(sequence.token_ids)
    assert len(known) > 12
    first.end()
    second = Paper(scheduler, paper_lease(16, 2, 16, 16, 100), Poisson(source, 1e-9))
    while not second.meter.ended:
        second.step()
    assert sequence.token_ids[: len(known)] == known
    assert len(sequence.token_ids) == 30


def test_the_error_of_a_ratio_is_that_of_rounds_which_differ_in_it() -> None:
    assert ratio_error([30.0, 60.0], [10.0, 20.0]) == 0  # a slow round is slow for both
    assert ratio_error([30.0], [10.0]) is None
    # Ratios without one round of three: 5 / 2, 4 / 2, 3 / 2; (n - 1) / n of the sum of their squared distances.
    assert ratio_error([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == round((2 / 3 * 0.5) ** 0.5, 3)


def test_samples_and_beams_are_of_the_requests_that_are_measured() -> None:
    found = samples.measure(_setting(Mix("trace", ((64, 8), (16, 80)))))["saved"]
    assert list(found) == ["trace"]
    alone = samples.measure(_setting(Mix("trace", ((64, 8),))))["saved"]  # of longer prompts more is shared
    assert found["trace"]["n"]["2"] < alone["trace"]["n"]["2"]
