"""Output tokens per second of Paged as it is served, beside other engines and beside what the machine could do at best.

R64: 64 requests of 32 to 512 tokens and outputs of 32 to 256, all at once. P64: 64 prompts with 1,024 tokens in common,
which are cached already, 64 of their own, and outputs of 128. The model has the shape of Qwen3-0.6B, in bf16, with
random weights, made once. Greedy; end tokens do not end anything.

Paged runs as an executor and a scheduler, asked over gRPC by this process, all on the same cores. Another engine runs
in its own interpreter (--peer) through its own interface for batches. Nothing runs beside what is timed. Each engine
starts anew for each run, is warmed up, and rests for some seconds: ours is ready before the system has given all of its
memory, and gets what is missing meanwhile. Runs of Paged and of others take turns, and a ratio is between neighbours.
The limit is bytes over bandwidth plus arithmetic over the rate of matrix products (benchmarks/serving/limit.py), both
measured at the beginning and again at the end of the run, of which the better figure counts.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.serving import random_model
from benchmarks.serving.limit import Rates, work_of
from benchmarks.serving.peers import Peer, PeerFailed
from benchmarks.serving.served import Run, run_paged
from benchmarks.serving.workloads import Workload, p64, r64
from paged.cli.processes import ServiceFailed

WORKLOADS: dict[str, Callable[[], Workload]] = {"R64": r64, "P64": p64}


@dataclass(frozen=True, slots=True)
class Turns:
    """Runs in their order: Paged, then each peer followed by Paged again."""

    paged: list[Run]
    peers: dict[str, Run]

    @property
    def paged_tokens_s(self) -> float:
        return median(run.tokens_s for run in self.paged)

    def ratios(self) -> dict[str, float]:
        """Paged's rate over each peer's: the mean of the runs before and after it."""
        return {
            name: mean([self.paged[i].tokens_s, self.paged[i + 1].tokens_s]) / run.tokens_s
            for i, (name, run) in enumerate(self.peers.items())
        }


async def take_turns(
    ours: Callable[[], Awaitable[Run]], theirs: dict[str, Callable[[], Awaitable[Run]]], say: Callable[[str, Run], None]
) -> Turns:
    turns = Turns([], {})

    async def again() -> None:
        turns.paged.append(await ours())
        say("paged", turns.paged[-1])

    await again()
    for name, run in theirs.items():
        turns.peers[name] = await run()
        say(name, turns.peers[name])
        await again()
    return turns


def measured_rates() -> Rates:
    """In a process of its own."""
    command = (sys.executable, "-m", "benchmarks.serving.machine")
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Rates(figures["read_bytes_s"], figures["flop_s"])


async def measure(args: argparse.Namespace) -> dict[str, object]:
    for peer in args.peer:
        await peer.check()
    cache_dir = args.cache_dir.expanduser()
    model = random_model.made_in(cache_dir)
    rates = [measured_rates()]
    taken: dict[str, tuple[Workload, Turns]] = {}
    for name in args.workload:
        workload = WORKLOADS[name]()
        print(f"{name}: {workload.tokens_in} tokens in, {workload.tokens_out} out", flush=True)
        theirs = {peer.name: _run_of(peer, workload, model, cache_dir) for peer in args.peer}

        def ours(workload: Workload = workload) -> Awaitable[Run]:
            return run_paged(workload, model, args.executor_flag)

        taken[name] = workload, await take_turns(ours, theirs, _say)
    rates.append(measured_rates())
    best = Rates(max(rate.read_bytes_s for rate in rates), max(rate.flop_s for rate in rates))
    figures = {name: _figures(workload, turns, best) for name, (workload, turns) in taken.items()}
    prefix = figures.pop("P64", None)
    whole: dict[str, object] = dict(figures.get("R64", {}))
    if prefix is not None:
        whole["prefix"] = {name: value for name, value in prefix.items() if name != "peers_tok_s"}
    return whole


def _run_of(peer: Peer, workload: Workload, model: Path, cache_dir: Path) -> Callable[[], Awaitable[Run]]:
    return lambda: peer.run(workload, model, cache_dir, len(os.sched_getaffinity(0)))


def _figures(workload: Workload, turns: Turns, rates: Rates) -> dict[str, object]:
    work = work_of(workload, random_model.costs())
    limit_s = work.limit_s(rates)
    parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in work.parts_s(rates).items())
    limit_ratio = turns.paged_tokens_s * limit_s / workload.tokens_out
    print(
        f"{workload.name}: limit {limit_s:.1f} s = {parts} ({work.num_steps} steps; {work.weight_bytes / 1e9:.0f} GB "
        f"of weights and {work.kv_bytes / 1e9:.0f} GB of KV at {rates.read_bytes_s / 1e9:.1f} GB/s, "
        f"{work.flop / 1e12:.1f} TFLOP at {rates.flop_s / 1e12:.2f} TFLOP/s) or {workload.tokens_out / limit_s:.0f} "
        f"tokens/s; Paged reaches {limit_ratio:.2f} of it"
    )
    return {
        "paged_tok_s": round(turns.paged_tokens_s, 1),
        "peers_tok_s": {name: round(run.tokens_s, 1) for name, run in turns.peers.items()},
        "ratio": {name: round(ratio, 3) for name, ratio in turns.ratios().items()},
        "limit_ratio": round(limit_ratio, 3),
    }


def _say(name: str, run: Run) -> None:
    cpu = ", ".join(f"{process} {seconds:.1f}" for process, seconds in run.cpu_s.items())
    line = f"{run.tokens} tokens in {run.seconds:.1f} s, {run.tokens_s:.1f} tokens/s; up after {run.start_s:.1f} s"
    print(f"  {name}: {line}" + (f"; seconds of CPU: {cpu}" if cpu else ""), flush=True)


def _peer(text: str) -> Peer:
    try:
        return Peer.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--peer", action="append", default=[], type=_peer, help="vllm=PYTHON or openvino=PYTHON")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="this one alone (more than once: these)")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("~/.cache/paged/benchmarks"), help="where the model is kept (1.2 GB)"
    )
    parser.add_argument(
        "--executor-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="for the executor, as --executor-flag=--x=y",
    )
    args = parser.parse_args()
    args.workload = args.workload or list(WORKLOADS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no engine is left behind
    try:
        figures = asyncio.run(measure(args))
    except (ServiceFailed, PeerFailed) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
