"""The commands and their flags."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paged.cli import bench as load_test
from paged.cli import demo as demonstration
from paged.cli import keys
from paged.cli import top as overview
from paged.cli import up as machine
from paged.cli.answers import Answer, AsJson, as_dict, say
from paged.cli.connection import Authority, Connection, Insecure, Tls, TlsCertificate, TlsKey, TlsRoot, TokenFile
from paged.cli.exit_codes import ExitCode, exit_code
from paged.cli.processes import ServiceFailed
from paged.cli.replay import run_replay
from paged.cli.show import printable
from paged.cli.talk import converse
from paged.client import PagedClientError, Prompt, chat
from paged.load import process
from paged.load.generator import Load
from paged.load.lengths import Mix

app = typer.Typer(no_args_is_help=True, add_completion=True)
app.add_typer(keys.app, name="keys")

Address = Annotated[
    str,
    typer.Option(
        envvar="PAGED_ADDRESS",
        help="Scheduler's address, as HOST:PORT; of several dns:///NAME:PORT or ipv4:IP:PORT,IP:PORT.",
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Equal seeds give equal draws.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Most seconds that an answer may take.")]
Model = Annotated[str, typer.Option(help="Served name; needed where several models are served.")]
OwnModel = Annotated[
    str | None, typer.Option(help="Directory, hub id or .gguf file; a small model is prepared if not given.")
]
Simulate = Annotated[bool, typer.Option("--simulate", help="Use the simulated executor, which has no model.")]
LengthMix = Annotated[Mix | None, typer.Option(help="Lengths as of instructions, or of conversations, instead.")]


@app.callback()
def connect(
    context: typer.Context,
    tls: Tls = False,
    tls_root: TlsRoot = None,
    tls_certificate: TlsCertificate = None,
    tls_private_key: TlsKey = None,
    authority: Authority = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
) -> None:
    """Talk to a Paged scheduler, or try Paged out."""
    context.obj = Connection(tls, tls_root, tls_certificate, tls_private_key, authority, token_file, insecure)


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    address: Address = "127.0.0.1:50051",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    seed: Seed = None,
    timeout_s: Timeout = None,
    model: Model = "",
    as_chat: Annotated[bool, typer.Option("--chat", help="Send the text as a user's turn of a conversation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stream the model's continuation of a text."""

    async def run() -> None:
        asked: Prompt = chat(("user", prompt)) if as_chat else prompt
        answer, options = Answer(), _options(max_tokens, temperature, seed, timeout_s, model)
        async with Connection.of(context).client(address) as client:
            async for message in client.generate(asked, **options):
                answer.take(message)
                if not as_json:
                    say(message.text)
        print(answer.as_json() if as_json else "")

    _run(run())


@app.command("chat")
def hold_chat(
    context: typer.Context,
    address: Address = "127.0.0.1:50051",
    system: Annotated[str | None, typer.Option(help="Instruction that the conversation begins with.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    seed: Seed = None,
    timeout_s: Timeout = None,
    model: Model = "",
    as_json: AsJson = False,
) -> None:
    """Talk with the model, a line at a time; /help lists what else can be said. Lines may come from a file, too."""
    connection, options = Connection.of(context), _options(max_tokens, temperature, seed, timeout_s, model)
    with _told():
        if (error := converse(lambda: connection.client(address), options, system, as_json=as_json)) is not None:
            raise error


@app.command()
def top(
    context: typer.Context,
    address: Address = "127.0.0.1:50051",
    period_ms: Annotated[int, typer.Option(min=100, max=60_000, help="Milliseconds between two pictures.")] = 500,
    as_json: AsJson = False,
) -> None:
    """Watch what a scheduler does: requests, rates, leases and every block. Ctrl-C ends it."""

    async def run() -> None:
        async with Connection.of(context).client(address) as client:
            await overview.run(client, address, period_ms, as_json=as_json)

    with _told(), suppress(KeyboardInterrupt):
        asyncio.run(run())


@app.command()
def info(context: typer.Context, address: Address = "127.0.0.1:50051", as_json: AsJson = False) -> None:
    """Show what is served, and how busy the scheduler is."""

    async def run() -> None:
        async with Connection.of(context).client(address) as client:
            load = await client.load()
            models = await client.models()
        if as_json:
            print(json.dumps({"models": [as_dict(model) for model in models], "load": as_dict(load)}))
            return
        for title, message in (*(("model", model) for model in models), ("load", load)):
            table = Table(title=title, show_header=False, title_justify="left")
            for name, value in as_dict(message).items():
                table.add_row(name, printable(str(value)))
            Console().print(table)

    _run(run())


@app.command()
def bench(
    context: typer.Context,
    address: Address = "127.0.0.1:50051",
    concurrency: Annotated[
        int, typer.Option(min=1, max=65_536, help="Requests at once, each followed by another.")
    ] = load_test.CONCURRENCY,
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=100_000, help="Requests a second, at random, instead.")
    ] = None,
    max_open: Annotated[
        int, typer.Option(min=1, max=65_536, help="With --rate: most requests at once; what comes then is not sent.")
    ] = load_test.MAX_OPEN,
    mix: LengthMix = None,
    prompt_tokens: Annotated[str, typer.Option(help="Length of prompts: 128, or 32-96.")] = "32-96",
    output_tokens: Annotated[str, typer.Option(help="Length of outputs.")] = "64-192",
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds that are measured.")] = 30.0,
    warm_up_s: Annotated[float, typer.Option(min=0, max=3600, help="Seconds before that.")] = 2.0,
    drain_s: Annotated[float, typer.Option(min=0, max=3600, help="Most seconds for the last answers to end.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Equal seeds ask for the same.")] = 0,
    model: Model = "",
    share_calls: Annotated[
        bool, typer.Option("--share-calls", help="Answers have a few calls together, not one each.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="SVG or PNG file to draw the figures into.")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask for much, and tell how it was answered: tokens a second, times at percentiles, refusals."""
    load = Load(
        address,
        concurrency if rate is None else max_open,
        prompt_tokens=_length_range(prompt_tokens),
        output_tokens=_length_range(output_tokens),
        mix=mix,
        rate=rate,
        model=model,
        share_calls=share_calls,
        seed=seed,
    )
    course = load_test.Course(warm_up_s, seconds, drain_s)
    _run(load_test.run(Connection.of(context), load, course, as_json=as_json, plot=plot), process.run)


@app.command()
def demo(
    model: OwnModel = None,
    simulate: Simulate = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 48,
    as_json: AsJson = False,
) -> None:
    """Start an executor and a scheduler, ask eight things at once, show the answers and figures, stop both."""
    _check_one_executor(model, simulate=simulate)
    _run(demonstration.run(model, simulate=simulate, max_tokens=max_tokens, as_json=as_json))


@app.command()
def up(
    model: OwnModel = None,
    simulate: Simulate = False,
    address: Annotated[str, typer.Option(help="Where gRPC calls are taken, as HOST:PORT.")] = "127.0.0.1:50051",
    as_json: AsJson = False,
) -> None:
    """Serve from this machine: one executor, started again when it ends, and one scheduler. Ctrl-C stops both.

    All else is set by the environment: PAGED_EXECUTOR_... and PAGED_SCHEDULER_..., as both commands' --help says.
    """
    _check_one_executor(model, simulate=simulate)
    _run(machine.run(model, simulate=simulate, address=address, as_json=as_json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def replay(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="Recording that an executor has written (its --record-dir).")],
) -> None:
    """Run a recording of an executor again, in a process of its own, and compare.

    Further flags go to it: --json, and those of paged-executor, such as --model.
    """
    raise typer.Exit(run_replay([file, *context.args]))


def _options(max_tokens: int, temperature: float, seed: int | None, timeout_s: float | None, model: str) -> Any:
    """Those of a request."""
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "model": model}
    return given | ({} if seed is None else {"seed": seed}) | ({} if timeout_s is None else {"timeout_s": timeout_s})


def _length_range(text: str) -> tuple[int, int]:
    try:
        return load_test.length_range(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _run(work: Coroutine[Any, Any, None], run: Callable[[Coroutine[Any, Any, None]], object] = asyncio.run) -> None:
    with _told():
        try:
            run(work)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong is one line on standard error, and an exit code that says what kind of thing it was."""
    try:
        yield
    except (PagedClientError, ServiceFailed, OSError, ValueError) as error:
        print(f"paged: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(exit_code(error)) from None


def _check_one_executor(model: str | None, *, simulate: bool) -> None:
    if model is not None and simulate:
        raise typer.BadParameter("give either --model or --simulate")
