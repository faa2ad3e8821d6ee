"""What was measured, as tables, as the one line of JSON, and as files."""

import json
import os
import platform
from pathlib import Path

from benchmarks.claims.served import Executor
from benchmarks.claims.setting import Figures, Setting
from benchmarks.claims.slabs import POLICIES

NAMES = {
    "paged": "paged, blocks of 16",
    "slab_max": "slab: maximum",
    "slab_pow2": "slab: power of two",
    "slab_oracle": "slab: oracle",
    "slab_oracle_first_fit": "slab: oracle, first fit",
}
PARTS = (
    "setting",
    "memory",
    "throughput",
    "step_costs",
    "rates",
    "answers",
    "prefixes",
    "pressure",
    "samples",
    "blocks",
    "table",
    "seconds",
)
# Of all KV memory, what held tokens in the PagedAttention paper's own experiment (its figure 2), by policy.
PAPER_SHARES = {"paged": 0.963, "slab_max": 0.204, "slab_pow2": 0.268, "slab_oracle": 0.382}


class NoFigures(Exception):
    """A file that holds none of ours."""


def read(path: Path) -> Figures:
    """What `write` has written. Raises NoFigures."""
    try:
        figures = json.loads(path.read_text())
    except OSError as error:
        raise NoFigures(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise NoFigures(f"{path}: is no JSON: {error}") from error
    lacking = [part for part in PARTS if not isinstance(figures, dict) or part not in figures]
    if lacking:
        raise NoFigures(f"{path}: lacks {', '.join(lacking)}: is no claims.json")
    return figures


def described(setting: Setting, executor: Executor, flags: list[str]) -> Figures:
    """The machine, the model, what the executor was told besides, and the requests that figures are of."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "model": executor.model,
        "executor_flags": flags,
        "kv_tokens": setting.kv_tokens,
        "longest": setting.longest,
        "window_s": setting.window_s,
        "plans": setting.num_plans,
        "mixes": {
            mix.name: {"mean_prompt": round(mix.mean_prompt, 1), "mean_output": round(mix.mean_output, 1)}
            for mix in setting.mixes
        },
    }


def summary(figures: Figures) -> Figures:
    """The last line of --json."""
    memory, throughput = figures["memory"], figures["throughput"]
    slabs = [name for name in POLICIES if name != "paged"]
    return {
        "utilisation": {name: {mix: found["utilisation"] for mix, found in memory[name].items()} for name in POLICIES},
        "concurrency_ratio": {
            name: {
                mix: round(memory["paged"][mix]["running"] / found["running"], 3) for mix, found in memory[name].items()
            }
            for name in slabs
        },
        "throughput_ratio": {
            name: {mix: by_policy[name]["paged_over_this"] for mix, by_policy in throughput.items()} for name in slabs
        },
        "throughput_ratio_error": {
            name: {mix: by_policy[name]["paged_over_this_error"] for mix, by_policy in throughput.items()}
            for name in slabs
        },
    }


def print_tables(figures: Figures) -> None:
    """Of the claims about policies; the other sections have said theirs."""
    ratios = summary(figures)
    print("== policies")
    print(
        f"{'':24}{'of allocated':>14}{'of all':>9}{'paper':>8}{'running':>9}{'tokens/s':>10}{'on paper':>10}"
        "   paged over it"
    )
    for mix, by_policy in figures["throughput"].items():
        for name, by_mix in figures["memory"].items():
            found, served = by_mix[mix], by_policy.get(name)
            paper = f"{PAPER_SHARES[name]:.1%}" if mix == "long" and name in PAPER_SHARES else ""
            line = f"{mix + ' ' + name:24.24}{found['utilisation']:14.1%}{found['shares']['tokens']:9.1%}{paper:>8}"
            line += f"{found['running']:9.1f}" + (
                f"{served['tokens_s']:10.1f}{served['paper_tokens_s']:10.1f}" if served else ""
            )
            if name in ratios["concurrency_ratio"]:
                running, tokens = (ratios[key][name][mix] for key in ("concurrency_ratio", "throughput_ratio"))
                error = ratios["throughput_ratio_error"][name][mix]
                line += f"   {running:.2f} x sequences, {tokens:.2f}{_give_or_take(error)} x tokens/s"
            print(line)


def write(figures: Figures, directory: Path) -> None:
    """claims.json, and each plot as SVG and PNG."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "claims.json").write_text(json.dumps(figures, indent=1) + "\n")
    from benchmarks.claims import plots  # only here: the extra bench brings what it needs

    plots.draw(figures, directory)


def _give_or_take(error: float | None) -> str:
    """One round has no error."""
    return "" if error is None else f" ± {error:.2f}"


def _cpu() -> str:
    """Its name where the system tells (Linux), else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
