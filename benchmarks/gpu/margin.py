"""The margin rule on whole models: what the executor computes on the device, judged by transformers' own attention.

The executor's ids are the context, so each output is judged by itself: how far the chosen token is below the best
one, and how far log-probabilities differ. The judge computes in fp32 with the very weights that the executor has.
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu import models
from benchmarks.gpu.backends import prepare
from benchmarks.gpu.graphs import recorded_graphs, runner_of
from benchmarks.gpu.parallel import side_by_side
from benchmarks.gpu.rows import Rows, Sequence, greedy
from benchmarks.gpu.sections import Machine, Report
from executor_svc.loaded import LoadedModel
from executor_svc.model.decode_graphs import DecodeGraphs

MARGINS = {"float32": 1e-4, "bfloat16": 0.25}  # nats
PEER_TIMES = 2.0  # or so often what transformers' own computation in that dtype is off
NEAR_TIE = 1e-4
NUM_TOP = 4
PROMPTS, TINY_PROMPTS = (1, 15, 16, 17, 100, 257, 333, 600), (1, 15, 16, 33)
OUTPUTS, TINY_OUTPUTS = 24, 5
CHUNK, TINY_CHUNK = 200, 14


@dataclass(slots=True)
class Judged:
    """Over all outputs: the worst gap to the best choice, the worst log-probability, how many choices were not best;
    and the worst of the log-probabilities that transformers itself gives in the executor's dtype."""

    outputs: int = 0
    gap: float = 0.0
    logprob: float = 0.0
    near_ties: int = 0
    peer_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A model in one dtype."""

    name: str
    directory: Path
    dtype: str
    machine: Machine


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    with tempfile.TemporaryDirectory() as directory:
        made = {
            family: models.save(config, Path(directory) / family, torch.float32, device)
            for family, config in models.margin_configs(tiny=machine.tiny).items()
        }
        given = {model: Path(model) for model in machine.models}
        jobs = [Job(name, place, dtype, machine) for name, place in (made | given).items() for dtype in MARGINS]
        left = {f"{job.name} {job.dtype}" for job in jobs}
        for job, judged in side_by_side(judge, jobs, machine, report):
            left.discard(f"{job.name} {job.dtype}")
            if isinstance(judged, Exception):
                report.fail(f"{job.name} {job.dtype}: {type(judged).__name__}: {judged}")
            else:
                _report_job(job, judged, report)
        if left:
            report.fail(f"there was no time for {', '.join(sorted(left))}")


def judge(job: Job) -> dict[str, Judged]:
    """What the model gives, without graphs and with."""
    device = torch.device(job.machine.device)
    prepare(device)
    loaded = models.loaded(job.directory, device, job.dtype, max_rows=8, max_model_len=1024, num_blocks=600)
    right = judge_of(job.directory, job.dtype, device)
    peer = right if job.dtype == "float32" else eager_model(job.directory, job.dtype, device)
    graphs = recorded_graphs(loaded)
    return {
        label: judged_by(right, peer, generated(loaded, used, job.machine), loaded.facts.vocab_size)
        for label, used in (("", None), (" with graphs", graphs))
    }


def _report_job(job: Job, judged: dict[str, Judged], report: Report) -> None:
    for label, result in judged.items():
        name = f"{job.name} {job.dtype}{label}"
        report.add(**{name: _figures(result)})
        allowed = max(MARGINS[job.dtype], PEER_TIMES * result.peer_logprob)
        if not (result.gap <= allowed and result.logprob <= allowed):
            report.fail(f"{name}: off by {result.gap:.3g} and {result.logprob:.3g} nats, margin {allowed:.3g}")


def _figures(judged: Judged) -> dict[str, float]:
    return {
        "outputs": judged.outputs,
        "worst_gap_nats": judged.gap,
        "worst_logprob_nats": judged.logprob,
        "near_ties": judged.near_ties,
        "transformers_logprob_nats": judged.peer_logprob,
    }


def judge_of(directory: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Weights as `dtype` rounds them, arithmetic in fp32."""
    return eager_model(directory, dtype, device).float()


def eager_model(directory: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """With transformers' own attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    )
    return model.to(device).eval()  # type: ignore[arg-type]  # its signature is hidden by a wrapper


def generated(loaded: LoadedModel, graphs: DecodeGraphs | None, machine: Machine) -> list[Sequence]:
    """Sequences in one batch: prompts in chunks, half of them beginning while the others decode."""
    runner, facts = runner_of(loaded), loaded.facts
    chance = random.Random(0)
    lengths, num_outputs = (TINY_PROMPTS, TINY_OUTPUTS) if machine.tiny else (PROMPTS, OUTPUTS)
    chunk = TINY_CHUNK if machine.tiny else CHUNK
    longest = facts.max_model_len - num_outputs
    rows = Rows(runner, loaded.num_blocks, facts.block_size)
    runner.graphs = graphs
    live: list[int] = []
    for i, length in enumerate(length for length in lengths if length <= longest):
        prompt = [chance.randrange(facts.vocab_size) for _ in range(length)]
        live.append(rows.begin(prompt, greedy(logprobs=NUM_TOP)))
        if i % 2:
            rows.run(live, chunk)
    while live := [row for row in live if rows.sequences[row].num_outputs < num_outputs]:
        rows.run(live, chunk)
    return rows.sequences


def judged_by(judge: PreTrainedModel, peer: PreTrainedModel, sequences: list[Sequence], num_ids: int) -> Judged:
    judged, device = Judged(), judge.device
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids, device=device)
        expected, peers = (log_probabilities(model, ids, sequence.num_prompt, num_ids) for model in (judge, peer))
        gaps = expected.amax(-1) - expected.gather(1, ids[sequence.num_prompt :, None])[:, 0]
        entries = torch.tensor([entry for entry, _ in sequence.logprobs], device=device)
        values = torch.tensor([value for _, value in sequence.logprobs], device=device, dtype=torch.float64)
        judged.outputs += len(gaps)
        judged.gap = worse(judged.gap, gaps)
        judged.logprob = worse(judged.logprob, (values - expected.gather(1, entries)).abs())
        judged.peer_logprob = worse(judged.peer_logprob, (peers - expected).gather(1, entries).abs())
        judged.near_ties += int((gaps > NEAR_TIE).sum())
    return judged


def log_probabilities(model: PreTrainedModel, ids: torch.Tensor, num_prompt: int, num_ids: int) -> torch.Tensor:
    """float64 `[outputs, num_ids]`: what each output is drawn from; a head may be wider than what ids there are."""
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, num_prompt - 1 : -1, :num_ids]
    return torch.log_softmax(logits.double(), -1)


def worse(worst: float, differences: torch.Tensor) -> float:
    """NaN is worse than any number, and stays."""
    return float(torch.cat([differences.flatten(), differences.new_tensor([worst])]).max())
