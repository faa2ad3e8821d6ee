"""The GPU check works where there is no GPU, and finds what is wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import kernels as kernel_section
from benchmarks.gpu import models, peers, shared, tables
from benchmarks.gpu.backends import REFERENCE
from benchmarks.gpu.batches import Heads
from benchmarks.gpu.compare import distance
from benchmarks.gpu.kernel_cases import Case, grid
from benchmarks.gpu.sections import Machine, Section, run_section
from benchmarks.gpu.timing import ratio
from kernels import Backend

CPU = torch.device("cpu")
MAY_BE_ZERO = {"worst_gap_nats", "near_ties", "cases_wrong", "transformers_logprob_nats", "flash_attention"}


def test_every_section_works_on_a_cpu_with_interpreted_kernels(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--device",
        "cpu",
        "--json",
        "--out",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0])
    assert json.loads((tmp_path / "out").read_text()) == result
    assert result["passed"] is True
    assert list(result["sections"]) == [section.name for section in gpu_check.SECTIONS]
    for section in result["sections"].values():
        assert section["errors"] == []
        numbers = dict(numbers_of(section))
        assert numbers
        assert not [
            name for name, number in numbers.items() if not number > 0 and name.split("/")[-1] not in MAY_BE_ZERO
        ]
    kernels = result["sections"]["kernels"]
    assert kernels["cases"] == kernels["cases_planned"] > 10
    assert kernels["highest_byte"] > 1 << 32
    assert set(kernels["worst"]) == {"float32", "float16"}


def numbers_of(figures, path=""):
    """Every number in nested figures, with its path."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from numbers_of(value, f"{path}{name}/")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


def test_all_sections_together_take_less_than_eight_minutes():
    assert sum(section.budget_s for section in gpu_check.SECTIONS) <= 8 * 60


def test_a_busy_cpu_is_given_longer_than_a_gpu_and_a_model_of_ones_own_time_of_its_own():
    margin = next(section for section in gpu_check.SECTIONS if section.name == "margin")
    gpu, own = Machine("cuda"), Machine("cuda", ("a model",))
    assert gpu_check.in_time(margin, gpu) == margin
    assert gpu_check.in_time(margin, own).budget_s > margin.budget_s
    for section in gpu_check.SECTIONS:
        assert gpu_check.in_time(section, Machine("cpu")).budget_s > 2 * section.budget_s


def test_the_exit_code_says_whether_anything_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "SECTIONS", (Section("not_there", 30),))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--json", "--device", "cpu"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # main sets it as well; this puts it back
    with pytest.raises(SystemExit) as exit_code:
        gpu_check.main()
    assert exit_code.value.code == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # main takes it away; this puts it back
    with pytest.raises(SystemExit) as exit_code:
        gpu_check.main()
    assert exit_code.value.code == 2
    assert "there is no GPU to check: torch" in capsys.readouterr().err


def hides_the_last_token(q, key_cache, value_cache, rows, rule):
    fewer = replace(rows, context_lens=(rows.context_lens - 1).clamp_min(0))
    return REFERENCE.paged_attention(q, key_cache, value_cache, fewer, rule)


def ignores_the_window(*arguments):
    *others, rule = arguments
    return REFERENCE.paged_attention(*others, replace(rule, window=None))


def ignores_the_sinks(*arguments):
    *others, rule = arguments
    return REFERENCE.paged_attention(*others, replace(rule, sinks=None))


def multiplies_what_is_in_unused_slots(q, key_cache, value_cache, *others):
    return REFERENCE.paged_attention(q, key_cache, value_cache, *others) + 0 * value_cache.sum()


def leaves_an_output_unwritten(q, *others):
    out = torch.empty_like(q)
    out[:-1] = REFERENCE.paged_attention(q, *others)[:-1]
    return out


def writes_the_next_slot(k, v, key_cache, value_cache, slots):
    REFERENCE.write_kv(k, v, key_cache, value_cache, slots ^ 1)


def forgets_a_value(k, v, key_cache, value_cache, slots):
    REFERENCE.write_kv(k, v, key_cache, value_cache, slots)
    value_cache[0, -1, 0, 0] = 1.0


def copies_one_after_another(caches, source, destination):
    for one, other in zip(source, destination, strict=True):
        REFERENCE.copy_blocks(caches, one[None], other[None])


CASE = Case(torch.float32, Heads(4, 2, 64), 16, ((1, 17), (3, 5), (1, 0), (2, 40)), window=9, sinks=True)


def backend_with(**functions):
    rest = {
        name: getattr(REFERENCE, name) for name in ("paged_attention", "write_kv", "copy_blocks", "allocate_caches")
    }
    return Backend("wrong", **rest | functions)


@pytest.mark.parametrize(
    ("functions", "error"),
    [
        ({"paged_attention": hides_the_last_token}, "paged_attention is off"),
        ({"paged_attention": ignores_the_window}, "paged_attention is off"),
        ({"paged_attention": ignores_the_sinks}, "paged_attention is off"),
        ({"paged_attention": leaves_an_output_unwritten}, "paged_attention is off"),
        ({"paged_attention": multiplies_what_is_in_unused_slots}, "NaN in unused slots"),
        ({"write_kv": writes_the_next_slot}, "write_kv leaves another key_cache"),
        ({"write_kv": forgets_a_value}, "write_kv leaves another value_cache"),
    ],
)
def test_a_wrong_kernel_is_found(monkeypatch, functions, error):
    monkeypatch.setattr(kernel_section, "checked_backend", lambda device: backend_with(**functions))
    assert any(found.startswith(error) for found in kernel_section.check_case(CASE, "cpu").errors)


def test_a_right_kernel_passes(monkeypatch):
    monkeypatch.setattr(kernel_section, "checked_backend", lambda device: REFERENCE)
    result = kernel_section.check_case(CASE, "cpu")
    assert result.errors == ()
    assert result.distance.relative < 1e-5


def test_copies_that_do_not_read_first_are_found():
    assert kernel_section.copies_are_wrong(REFERENCE, CPU) == []
    assert kernel_section.copies_are_wrong(backend_with(copy_blocks=copies_one_after_another), CPU)


def test_a_model_over_a_wrong_kernel_breaks_the_margin(monkeypatch):
    wrong = backend_with(paged_attention=hides_the_last_token)
    monkeypatch.setattr(models, "checked_backend", lambda device: wrong)
    outcome = run_section(Section("margin", 120), Machine("cpu"))
    assert {error.split(":")[0] for error in outcome.errors} == {
        f"{family} float32{label}" for family in ("llama", "gemma3") for label in ("", " with graphs")
    }


def test_a_peer_with_other_results_is_not_timed(monkeypatch):
    shape = peers.Shape(Heads(4, 2, 16), num_rows=2, queries=1, context=20)
    monkeypatch.setattr(peers, "checked_backend", lambda device: REFERENCE)
    assert peers.against_peers(shape, CPU)["sdpa_by_paged"] > 0
    wrong = backend_with(paged_attention=hides_the_last_token)
    monkeypatch.setattr(peers, "checked_backend", lambda device: wrong)
    with pytest.raises(ValueError, match="sdpa and ours differ"):
        peers.against_peers(shape, CPU)


def test_a_variant_without_a_table_that_has_other_results_is_not_timed(monkeypatch):
    wrong = backend_with(paged_attention=hides_the_last_token)
    monkeypatch.setattr(tables, "checked_backend", lambda device: wrong)
    with pytest.raises(ValueError, match="with a table and without differ"):
        tables.with_and_without(Heads(4, 2, 16), [(1, 20)] * 2, 16, CPU)


def loses_what_rows_share(q, key_cache, value_cache, rows, rule):
    """The rows' own blocks alone."""
    if rows.shared is not None:
        own_start, tables = rows.shared.own_start, rows.block_tables.clone()
        for row, start in enumerate(own_start.tolist()):
            tables[row, : tables.shape[1] - start] = rows.block_tables[row, start:]
        rows = replace(rows, block_tables=tables, context_lens=rows.context_lens - 16 * own_start)
    return REFERENCE.paged_attention(q, key_cache, value_cache, rows, rule)


def test_shared_blocks_that_are_lost_are_found():
    heads = Heads(4, 2, 64)
    assert shared.worst_error(REFERENCE, heads, 2, torch.float32, CPU)["relative_error"] < 1e-5
    wrong = backend_with(paged_attention=loses_what_rows_share)
    with pytest.raises(ValueError, match="with no options off by"):
        shared.worst_error(wrong, heads, 2, torch.float32, CPU)


@pytest.mark.parametrize(("queries", "context"), [(1, 9), (3, 5), (7, 7)])
def test_only_what_a_query_may_see_counts_as_work(queries, context):
    pairs = sum(context - queries + i + 1 for i in range(queries))
    shape = peers.Shape(Heads(4, 2, 16), num_rows=2, queries=queries, context=context)
    assert peers.flop(shape) == 2 * (2 * 2 * 4 * 16 * pairs)  # rows; products, two operations, heads, size


def test_a_ratio_is_the_median_of_neighbours_and_not_of_all():
    times = {"slow": [2.0, 40.0, 6.0], "fast": [1.0, 10.0, 6.0]}
    assert ratio(times, "slow", "fast") == 2.0


def test_nothing_but_zeros_will_do_where_zeros_are_expected():
    zeros = torch.zeros(2, 3, 8)
    assert distance(zeros, zeros).within(torch.bfloat16)
    assert not distance(zeros + 1e-20, zeros).within(torch.bfloat16)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_within_no_tolerance(wrong):
    out = torch.ones(2, 3, 8)
    out[1, 2, 7] = wrong
    assert not distance(out, torch.ones(2, 3, 8)).within(torch.bfloat16)


def test_the_full_grid_meets_each_head_size_and_group_with_each_dtype():
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    cases = list(grid(dtypes, tiny=False))
    for dtype in dtypes:
        ours = [case for case in cases if case.dtype == dtype]
        assert {case.heads.dim for case in ours} >= {64, 80, 96, 112, 128, 192, 256}
        assert {case.heads.query // case.heads.kv for case in ours} >= {1, 2, 3, 4, 7, 16}
        assert {case.block_size for case in ours} >= {16, 32, 64, 128, 256}
        assert {case.window is None for case in ours} == {case.soft_cap is None for case in ours} == {True, False}
        assert {case.sinks for case in ours} == {True, False}
        assert any(max(context for _, context in case.rows) >= 1 << 15 for case in ours)
