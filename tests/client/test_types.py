"""What a type checker tells the client's users: it sees the annotations, and knows a wrong call from a right one."""

import re
import subprocess
import sys

import pytest

RIGHT = """
from collections.abc import AsyncIterator, Iterator

from paged.blocking import BlockingClient
from paged.client import Client, Completion, Options, PagedClientError, Retries, chat, tls_credentials
from paged.v1.inference_pb2 import BeamSearch, GenerateResponse


async def asks(options: Options) -> AsyncIterator[str]:
    async with Client("localhost:1", credentials=tls_credentials("ca.pem"), retries=Retries(max_attempts=2)) as client:
        reveal_type(client)
        async for message in client.generate(chat(("user", "hi")), temperature=0, stop=["a"], timeout_s=1.5):
            reveal_type(message)
            yield message.text
        whole = await client.complete([1, 2], **options)
        reveal_type(whole)
        reveal_type(whole.usage.completion_tokens)
        reveal_type((await client.load()).running_sequences)
        samples: list[Completion] = await client.complete_samples("hi", n=2, beam=BeamSearch(width=2))
        yield samples[0].text


def asks_and_waits() -> Iterator[GenerateResponse]:
    with BlockingClient("localhost:1", token_file="token", insecure=True) as client:
        try:
            yield from client.generate("hi", max_tokens=3)
        except PagedClientError as error:
            reveal_type(error.code)
        reveal_type(client.complete("hi").logprobs)
"""
REVEALED = [
    "paged.client.Client",
    "paged.v1.inference_pb2.GenerateResponse",
    "paged.client.Completion",
    "int",
    "int",
    "grpc.StatusCode",
    "list[paged.v1.inference_pb2.TokenLogprobs]",
]
# Each is one line, with the kind of mistake that it is.
WRONG = {
    'client.complete("hi", temprature=1.0)': "call-arg",
    'client.complete("hi", temperature="warm")': "arg-type",
    "client.complete(7)": "arg-type",
    'client.complete("hi").txt': "attr-defined",
    'next(client.generate("hi")).finnish': "attr-defined",
    "client.watsh()": "attr-defined",
    "BlockingClient(retries=3)": "arg-type",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each program, line by line, as somebody runs it who has installed the client."""
    directory = tmp_path_factory.mktemp("types")
    (directory / "right.py").write_text(RIGHT)
    lines = "\n".join(f"    {line}" for line in WRONG)
    (directory / "wrong.py").write_text(
        f"from paged.blocking import BlockingClient\n\n\ndef asks(client: BlockingClient) -> None:\n{lines}\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--hide-error-context",
        "--config-file=",
        "right.py",
        "wrong.py",
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=600)
    told = done.stdout.splitlines()
    assert any(line.startswith("wrong.py") for line in told), done.stdout + done.stderr
    return {name: [line for line in told if line.startswith(f"{name}.py")] for name in ("right", "wrong")}


def test_right_calls_pass_the_strictest_check_and_have_their_types(checked: dict[str, list[str]]) -> None:
    assert not [line for line in checked["right"] if "error:" in line]
    found = [match[1] for line in checked["right"] if (match := re.search(r'Revealed type is "([^"]*)"', line))]
    assert [kind.replace("builtins.", "") for kind in found] == REVEALED


def test_wrong_calls_are_found_line_by_line(checked: dict[str, list[str]]) -> None:
    found = [re.search(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]$", line) for line in checked["wrong"]]
    by_line = {int(match[1]): match[2] for match in found if match}
    assert by_line == dict(enumerate(WRONG.values(), start=5)), checked["wrong"]
