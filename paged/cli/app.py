"""The commands and their flags."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from paged.cli import demo as demonstration
from paged.cli.processes import DemoFailed
from paged.cli.show import printable
from paged.client import Client, PagedClientError, Prompt, chat

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Talk to a Paged scheduler, or try Paged out.")

Address = Annotated[str, typer.Option(help="Scheduler's address, as HOST:PORT.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    address: Address = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Equal seeds give equal draws.")] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send the text as a user's turn of a conversation.")] = False,
) -> None:
    """Stream the model's continuation of a text."""

    async def run() -> None:
        asked: Prompt = chat(("user", prompt)) if as_chat else prompt
        seeded = {} if seed is None else {"seed": seed}
        async with Client(address) as client:
            options: Any = {"max_tokens": max_tokens, "temperature": temperature, **seeded}
            async for message in client.generate(asked, **options):
                print(printable(message.text), end="", flush=True)
        print()

    _run(run())


@app.command()
def info(address: Address = "127.0.0.1:50051") -> None:
    """Show what is served, and how busy the scheduler is."""

    async def run() -> None:
        async with Client(address) as client:
            load = await client.load()
            model = await client.model()
        for title, message in (("model", model), ("load", load)):
            table = Table(title=title, show_header=False, title_justify="left")
            for name, value in _rows(message):
                table.add_row(name, printable(str(value)))
            Console().print(table)

    _run(run())


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Directory, hub id or .gguf file; a small model is prepared if not given.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Use the simulated executor, which has no model.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 48,
) -> None:
    """Start an executor and a scheduler, ask eight things at once, show the answers and figures, stop both."""
    if model is not None and simulate:
        raise typer.BadParameter("give either --model or --simulate")
    _run(demonstration.run(model, simulate=simulate, max_tokens=max_tokens))


def _rows(message: Any) -> list[tuple[str, Any]]:
    shown = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return list(shown.items())


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except (PagedClientError, DemoFailed) as error:
        print(f"paged: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
