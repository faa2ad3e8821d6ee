"""The day a GPU is at hand: are the kernels right on it, is a model, and how fast is it beside what it could be.

`python -m benchmarks.gpu_check` takes less than eight minutes. docs/gpu.md says what each section checks, what to
expect of its figures, and how to bring it to a machine that can reach nothing. With `--device cpu` everything runs on
tiny sizes, the kernels in Triton's interpreter: its figures say nothing then, but that it works is proved.

Exit code 1 if anything is wrong.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.sections import Machine, Outcome, Section, run_section

# What is worth most comes first. Together less than eight minutes.
SECTIONS = (
    Section("environment", 20),
    Section("kernels", 95),
    Section("margin", 100),
    Section("no_sync", 35),
    Section("bandwidth", 55),
    Section("peers", 40),
    Section("tables", 25),
    Section("shared", 25),
    Section("steps", 85),
)
IMPORTED_ONCE = ("benchmarks.gpu.kernels", "benchmarks.gpu.steps")  # on a CPU, where sections begin as forks
OWN_MODEL_S = 120.0  # more, for each that is named
CPU_PATIENCE = 4  # times as long: the interpreter shares its cores with others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.name for section in SECTIONS]
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes, in the interpreter")
    parser.add_argument("--out", type=Path, help="file that the JSON is written to after each section")
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="sections to run")
    parser.add_argument("--model", action="append", default=[], help="directory of a model for the margin rule, too")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model whose steps are timed")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        for module in IMPORTED_ONCE:
            importlib.import_module(module)
    else:
        os.environ.pop("TRITON_INTERPRET", None)
        if problem := why_not_cuda():
            parser.error(f"there is no GPU to check: {problem}; or try the check itself with --device cpu")
    machine = Machine(args.device, tuple(args.model), 2 if args.device == "cpu" else args.layers)
    outcomes: dict[str, Outcome] = {}
    for section in SECTIONS:
        if section.name in args.only:
            outcomes[section.name] = run_section(in_time(section, machine), machine)
            print(table(section.name, outcomes[section.name]), file=sys.stderr if args.json else sys.stdout, flush=True)
            if args.out:
                args.out.write_text(json.dumps(summary(machine, outcomes)) + "\n")
    if args.json:
        print(json.dumps(summary(machine, outcomes)))
    sys.exit(0 if passed(outcomes) else 1)


def why_not_cuda() -> str | None:
    from executor_svc.model import device  # only here: what imports triton is to come after main has begun

    return device.Machine.look().why_not_cuda()


def in_time(section: Section, machine: Machine) -> Section:
    """A model of one's own takes time of its own, and a CPU more of all."""
    own_s = OWN_MODEL_S * len(machine.models) if section.name == "margin" else 0.0
    return replace(section, budget_s=(section.budget_s + own_s) * (CPU_PATIENCE if machine.tiny else 1))


def passed(outcomes: dict[str, Outcome]) -> bool:
    return not any(outcome.errors for outcome in outcomes.values())


def summary(machine: Machine, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    return {
        "passed": passed(outcomes),
        "device": machine.device,
        "seconds": round(sum(outcome.seconds for outcome in outcomes.values()), 1),
        "sections": {
            name: {"seconds": round(outcome.seconds, 1), "errors": outcome.errors, **outcome.figures}
            for name, outcome in outcomes.items()
        },
    }


def table(name: str, outcome: Outcome) -> str:
    """A section for a reader: a line a figure."""
    verdict = "wrong" if outcome.errors else "passed"
    lines = [f"{name}: {verdict}, {outcome.seconds:.1f} s", *(f"  ! {error}" for error in outcome.errors)]
    return "\n".join([*lines, *(f"  {line}" for line in figure_lines(outcome.figures))])


def figure_lines(figures: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            lines += [f"{indent}{name}", *figure_lines(value, indent + "  ")]
        elif isinstance(value, dict):
            lines.append(f"{indent}{name}: " + ", ".join(f"{key} {shown(inner)}" for key, inner in value.items()))
        else:
            lines.append(f"{indent}{name}: {shown(value)}")
    return lines


def shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
