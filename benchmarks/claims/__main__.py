"""What paged attention promises, measured on this engine.

    python -m benchmarks.claims [--quick] [--json] [--model DIR] [--trace FILE] [--out DIR]

KV memory is handed out in blocks, or in slabs as engines without block tables do (benchmarks/claims/slabs.py), while
scheduler, executor, kernels and model stay the same. Memory is counted on paper: by the real core with an executor that
takes no time. Rates are those of a real executor process with the small real model of the demo, or the one that is
named, which this process drives over the plan stream. KV memory is set small, so that it is memory that limits how many
sequences run, as it does where a model fills a GPU.

docs/claims.md says what each part shows. With --json the last line is
{"utilisation": {policy: {mix: ..}}, "concurrency_ratio": {slab policy: {mix: ..}}, "throughput_ratio": {..},
"throughput_ratio_error": {..}}; the last are standard errors over rounds, null where there was one.
"""

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.claims import answers, blocks, memory, prefixes, pressure, rates, report, samples, throughput
from benchmarks.claims.requests import TraceError, drawn_mix, trace_mix
from benchmarks.claims.served import Executor, ServingFailed
from benchmarks.claims.setting import BLOCK_SIZE, KV_TOKENS, LONGEST, MAX_ROWS, TOKENS_PER_STEP, Figures, Setting
from paged.cli.processes import ServiceFailed
from paged.load.lengths import MIXES
from scheduler_svc.logs import configure_logs

WINDOW_S, QUICK_WINDOW_S = 20.0, 2.0
PLANS, QUICK_PLANS = 8000, 1000


async def measure(args: argparse.Namespace) -> Figures:
    """All figures, section by section."""
    began = time.perf_counter()
    if args.trace:
        trace_mix(args.trace, LONGEST)  # what cannot be read is told before anything is started
    configure_logs("error")

    def section(name: str) -> None:
        print(f"== {name} ({time.perf_counter() - began:.0f} s)", flush=True)

    async with Executor.started(_flags(args)) as executor:
        setting = _setting(args, executor)
        figures: Figures = {"setting": report.described(setting, executor, args.executor_flag)}
        section("memory under each policy, on paper")
        figures["memory"] = memory.measure(setting)
        section("tokens per second at saturation")
        figures["throughput"], costs = await throughput.measure(setting, executor)
        figures["step_costs"] = {mix: asdict(of_mix) for mix, of_mix in costs.items()}
        section("latency against the rate of requests")
        figures["rates"] = await rates.measure(setting, executor, figures["throughput"], costs)
        section("the same tokens under each policy")
        figures["answers"] = await answers.measure(setting, executor)
        section("prefix sharing")
        figures["prefixes"] = await prefixes.measure(setting, executor)
        section("preemption under pressure")
        last = setting.mixes[-1].name
        usual = figures["throughput"][last]["paged"]["windows_tokens_s"]
        figures["pressure"] = await pressure.measure(setting, executor, usual, costs[last])
    section("samples and beams, on paper")
    figures["samples"] = samples.measure(setting)
    section("block sizes and tables, on the CPU")
    figures["blocks"] = {"waste": blocks.waste(setting), "speed": blocks.speed(setting), "device": blocks.DEVICE}
    figures["table"] = blocks.table(setting)
    figures["seconds"] = round(time.perf_counter() - began)
    return figures


def _flags(args: argparse.Namespace) -> list[str]:
    """Of the executor: the policies' memory, or more where another section takes more."""
    lent = max(args.kv_tokens, prefixes.KV_TOKENS) // BLOCK_SIZE
    flags = ["--model", str(args.model or _demo_model())]
    flags += ["--num-blocks", str(lent + 1), "--block-size", str(BLOCK_SIZE)]  # one is reserved
    flags += ["--max-rows", str(MAX_ROWS), "--tokens-per-step", str(TOKENS_PER_STEP)]
    return [*flags, *args.executor_flag]


def _setting(args: argparse.Namespace, executor: Executor) -> Setting:
    longest = min(LONGEST, executor.lease.max_model_len)
    mixes = (trace_mix(args.trace, longest),) if args.trace else tuple(drawn_mix(name, longest) for name in MIXES)
    return Setting(
        mixes=mixes,
        vocab_size=executor.lease.vocab_size,
        longest=longest,
        kv_tokens=args.kv_tokens,
        window_s=QUICK_WINDOW_S if args.quick else WINDOW_S,
        num_plans=QUICK_PLANS if args.quick else PLANS,
        quick=args.quick,
        say=lambda text: print(f"  {text}", flush=True),
    )


def _demo_model() -> Path:
    """Prepared once."""
    from executor_svc.model.demo_model import demo_model_path

    return demo_model_path()


def _check_out(directory: Path) -> None:
    """Before a quarter of an hour is spent on what cannot be kept."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("--out draws plots, which takes matplotlib: pip install '.[bench]'")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        sys.exit(f"--out: cannot write to {directory}: {error.strerror}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two minutes instead of fifteen; figures are rougher")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--model", type=Path, help="directory of the model that is served; the demo's if unset")
    parser.add_argument("--trace", type=Path, help="CSV of prompt_tokens,output_tokens instead of the two mixes")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="slots of KV memory that policies share out")
    parser.add_argument("--out", type=Path, help="directory for claims.json and plots (extra bench); none if unset")
    parser.add_argument("--redraw", type=Path, help="measure nothing: draw the plots of this claims.json")
    parser.add_argument("--executor-flag", action="append", default=[], help="one more for the executor; repeatable")
    args = parser.parse_args()
    if args.kv_tokens < LONGEST:
        parser.error(f"--kv-tokens: is {args.kv_tokens}; must be {LONGEST} or more, which is the longest slab")
    if args.out:
        _check_out(args.out)
    try:
        figures = report.read(args.redraw) if args.redraw else asyncio.run(measure(args))
    except (ServiceFailed, ServingFailed, TraceError, report.NoFigures) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    report.print_tables(figures)
    if args.out:
        report.write(figures, args.out)
    if args.json:
        print(json.dumps(report.summary(figures)))


if __name__ == "__main__":
    main()
