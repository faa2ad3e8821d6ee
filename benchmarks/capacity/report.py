"""What was found, as tables."""

from typing import Any

Figures = dict[str, Any]


def print_tables(figures: Figures) -> None:
    _print_costs(figures["costs"])
    print("\nsimulated beside real, one executor with steps of 10 ms and more")
    for point in figures["validation"]:
        print(f"{point['schedulers']} scheduler(s): " + ", ".join(_beside(point, name) for name in point["real"]))
    _print_heads(figures)
    for row in figures["executors"]:
        line = f"{row['fixed_ms']:9.2f}{row['mix']:>8}{row['running']:9}{row['step_ms']:9.1f}{row['requests_s']:10.2f}"
        print(line + f"{row['tokens_s']:9}{row['loop_share_of_one']:9.2f}" + _cell(row))
    bound = f"p99 of the time to first token within {figures['ttft_ms']:g} ms"
    print(f"\nfleets for the mix {figures['fleet_mix']}, fixed part {figures['fleet_fixed_ms']:g} ms, {bound}")
    print(
        f"{'requests/s':>11}{'executors':>11}{'schedulers':>12}{'load':>6}{'tokens/s':>10}{'loop':>6}{'cores':>8}"
        f"{'first token ms':>16}{'between ms':>15}"
    )
    for row in figures["fleets"]:
        line = f"{row['rate']:11g}{row['executors']:11}{row['schedulers']:12}{row['load']:6.2f}"
        line += f"{row['simulated_tokens_s']:10}{row['loop_share']:6.2f}{row['scheduler_cores']:8.1f}"
        print(line + _latencies(row))
    if not figures["fleets"]:
        print("none: even an executor with half of the load that it could serve is later, or plans alone take too long")


def _print_heads(figures: Figures) -> None:
    tokens, context = figures["doubling"]
    print(f"\none executor at {figures['load']:g} of the most that it could serve; {tokens} tokens, or {context} of")
    print("context, take as long as a step's fixed part; the last rows are the model that was measured")
    heads = (
        ("fixed", "ms", 9), ("mix", "", 8), ("running", "", 9), ("step", "ms", 9), ("requests", "/s", 10),
        ("tokens", "/s", 9), ("loop of", "one", 9), ("schedulers", ": executors", 12), ("cores", "", 7),
        ("first", "p50", 8), ("token ms", "p99", 9), ("between", "p50", 8), ("ms", "p99", 8),
    )  # fmt: skip
    print("".join(f"{above:>{width}}" for above, _, width in heads))
    print("".join(f"{below:>{width}}" for _, below, width in heads))


def _print_costs(costs: Figures) -> None:
    print("\ncosts of a scheduler, in µs: of its event loop, and of its process")
    for name in costs["loop_us"]:
        print(f"{name.replace('_', ' '):>14}{costs['loop_us'][name]:10.2f}{costs['process_us'][name]:10.2f}")
    print(f"memory: {costs['idle_mb']:.0f} MB, and {costs['stream_kb']:.1f} kB for each open stream")


def _beside(point: Figures, name: str) -> str:
    return f"{name} {point['simulated'][name]:g} beside {point['real'][name]:g} ({point['ratio'][name]:g})"


def _cell(row: Figures) -> str:
    if row["cell"] is None:
        return f"  none: {row['why']}"
    cell = f"{row['cell']['schedulers']} : {row['cell']['executors']}"
    return f"{cell:>12}{row['scheduler_cores']:7.2f}" + _latencies(row)


def _latencies(row: Figures) -> str:
    first, between = row["ttft_ms"], row["itl_ms"]
    return f"{first['p50']:8.0f}{first['p99']:9.0f}{between['p50']:8.1f}{between['p99']:8.1f}"
