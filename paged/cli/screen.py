"""What `paged top` draws: figures, the blocks of each executor, requests."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paged.cli.show import printable
from paged.v1 import control_pb2
from paged.watched import BLANK, CACHED, HELD_BY_NONE, NOT_LENT, BlockCounts, BlockStates, counts_of

CELL = "■"
BARS = " ▁▂▃▄▅▆▇█"
MAP_LINES = 12
COLOURS = {
    "not lent": "#3a3f45",
    "blank": "#5b636d",
    "cached": "#4fa37c",
    "in use": "#4c88d9",
    "shared": "#c05bd0",
    "copied": "#ffd54a",
}
STATES = {
    control_pb2.LiveRequest.STATE_WAITING: "waiting",
    control_pb2.LiveRequest.STATE_PREFILL: "prefill",
    control_pb2.LiveRequest.STATE_DECODE: "decode",
    control_pb2.LiveRequest.STATE_ENDED: "ended",
}


def screen(
    address: str,
    message: control_pb2.WatchResponse,
    states: BlockStates,
    rates: Sequence[float],
    width: int,
    height: int,
) -> RenderableType:
    """One picture of so many columns and lines. `rates` are tokens per second, the newest last."""
    executors = [_executor(executor, states.of[executor.endpoint], width) for executor in message.executors]
    num_lines = max(height - 6 - sum(lines for _, lines in executors), 3)
    return Group(
        _figures(address, message, rates, width), *(panel for panel, _ in executors), _requests(message, num_lines)
    )


def _figures(address: str, message: control_pb2.WatchResponse, rates: Sequence[float], width: int) -> Text:
    load, now = message.load, message.rates
    models = ", ".join(dict.fromkeys(executor.model for executor in load.executors if executor.model)) or "no model yet"
    first = Text.assemble(("paged top ", "bold"), printable(f"{address}  {models}"), no_wrap=True, overflow="ellipsis")
    parts = [
        (f"{now.generated_tokens_per_s:,.0f}", "tokens/s"),
        (f"{now.prompt_tokens_per_s:,.0f}", "prompt tokens/s"),
        (f"{now.steps_per_s:,.0f}", "steps/s"),
        (f"{load.running_sequences:,}", "running"),
        (f"{load.waiting_sequences:,}", "waiting"),
        (f"{load.finished_requests:,}", "finished"),
        (f"{load.preemptions:,}", "preempted"),
    ]
    figures = Text(no_wrap=True, overflow="ellipsis")
    for value, name in parts:
        figures.append(value, "bold").append(f" {name}   ", "dim")
    return Text("\n").join([first, figures, Text(_sparks(rates[-width:]), style=COLOURS["in use"], no_wrap=True)])


def _sparks(values: Sequence[float]) -> str:
    top = max(values, default=0.0) or 1.0
    return "".join(BARS[round((len(BARS) - 1) * value / top)] for value in values)


def _executor(executor: control_pb2.ExecutorBlocks, states: bytes | bytearray, width: int) -> tuple[Panel, int]:
    """And how many lines it has."""
    counts = counts_of(states[1:])  # block 0 is never lent
    cells, per_cell = _map(states[1:], set(executor.copied_blocks), width - 4)
    legend = _legend(counts, executor.copies)
    note = f"{per_cell} blocks a cell, shown as the busiest of them  " if per_cell > 1 else ""
    lease = (
        f"{note}lent {executor.lent_blocks:,} of {executor.most_blocks:,} blocks of {executor.block_size} tokens, "
        f"{executor.lent_rows} of {executor.most_rows} rows ({executor.free_rows} free), "
        f"{executor.lent_tokens_per_step:,} tokens a step"
    )
    body = Group(legend, cells, Text(lease, style="dim", no_wrap=True, overflow="ellipsis"))
    title = Text(printable(executor.endpoint) + ("" if executor.session else " (not attached)"))
    return Panel(body, title=title, title_align="left", border_style="dim"), len(cells.plain.splitlines()) + 4


def _legend(counts: BlockCounts, copies: int) -> Text:
    shown = [
        ("not lent", counts.not_lent),
        ("blank", counts.blank),
        ("cached", counts.cached),
        ("in use", counts.used - counts.shared),
        ("shared", counts.shared),
        ("copied", copies),
    ]
    legend = Text(no_wrap=True, overflow="ellipsis")
    for name, count in shown:
        if count or name != "not lent":
            legend.append(CELL, COLOURS[name]).append(f" {name} ").append(f"{count:,}   ", "bold")
    return legend


def _map(states: bytes | bytearray, copied: set[int], width: int) -> tuple[Text, int]:
    """The cells, and how many blocks each of them stands for. `states` begin with block 1."""
    width = max(width, 1)
    per_cell = max(1, -(-len(states) // (width * MAP_LINES)))
    text = Text(no_wrap=True)
    for i, begin in enumerate(range(0, len(states), per_cell)):
        if i and i % width == 0:
            text.append("\n")
        group = states[begin : begin + per_cell]
        is_copied = bool(copied) and not copied.isdisjoint(range(begin + 1, begin + 1 + len(group)))
        text.append(CELL, COLOURS["copied"] if is_copied else _colour(max(group)))
    return text, per_cell


def _colour(state: int) -> str:
    if state == HELD_BY_NONE + 1:
        return COLOURS["in use"]
    return COLOURS[{NOT_LENT: "not lent", BLANK: "blank", CACHED: "cached"}.get(state, "shared")]


def _requests(message: control_pb2.WatchResponse, num_lines: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("request", no_wrap=True, max_width=32)
    table.add_column("state")
    for name in ("prompt", "cached", "output", "sequences", "blocks", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tenant", no_wrap=True, max_width=16)
    shown = message.requests[:num_lines]
    for request in shown:
        sequences = f"{request.sequences}"
        if request.running_sequences not in (0, request.sequences):
            sequences = f"{request.running_sequences}/{request.sequences}"
        table.add_row(
            Text(printable(request.request_id)),
            STATES.get(request.state, ""),
            *(
                f"{value:,}"
                for value in (request.prompt_tokens, request.cached_prompt_tokens, request.generated_tokens)
            ),
            sequences,
            f"{request.table_blocks:,}",
            f"{request.age_ms / 1000:.1f} s",
            Text(printable(request.tenant)),
        )
    if message.num_requests > len(shown):
        table.add_row(Text(f"and {message.num_requests - len(shown):,} more", style="dim"))
    return table
