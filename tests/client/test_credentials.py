"""What a client shows to a scheduler, and where it does not."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from paged.client import Client, Retries, tls_credentials
from paged.credentials import Token, is_local_target

SECRET = "paged_a-token-that-is-secret"
LOCAL = [
    *("127.0.0.1:1", "localhost:1", "localhost", "[::1]:1", "dns:///localhost:1", "dns://10.0.0.2/127.0.0.1:1"),
    *("dns:localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "unix:/run/paged", "ipv4:127.0.0.1"),
]
BEYOND = [
    *("10.0.0.1:1", "scheduler:1", "dns:///scheduler:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "[2001:db8::1]:1"),
    *("127.evil.test:1", "localhost.evil.test:1", "dns:///evil.test/127.0.0.1.evil.test:1", "xds:///localhost"),
]


@pytest.mark.parametrize("target", LOCAL)
def test_targets_on_this_machine(target: str) -> None:
    assert is_local_target(target)


@pytest.mark.parametrize("target", BEYOND)
async def test_a_token_does_not_leave_the_machine_unencrypted(target: str) -> None:
    with pytest.raises(ValueError, match="unencrypted") as caught:
        Client(target, token=SECRET)
    assert SECRET not in str(caught.value)
    for allowed in ({"insecure": True}, {"credentials": tls_credentials()}):
        async with Client(target, token=SECRET, **allowed) as client:  # type: ignore[arg-type]
            assert SECRET not in repr(client)


async def test_nor_by_way_of_a_proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")  # nobody is there
    for variable in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    async with Client(address, token=SECRET, retries=Retries(1)) as client:
        assert (await client.complete("hi", timeout_s=10)).text == "Once!"


@pytest.mark.parametrize("text", ["", " \n", "two words", "caf\u00e9", "a\x00b", "a\nb"])
def test_what_is_no_token_is_refused_and_not_quoted(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    for given in ({"token": text}, {"token_file": file}):
        with pytest.raises(ValueError, match="one word of printable ASCII") as caught:
            Token(**given)  # type: ignore[arg-type]
        assert not text.strip() or text.strip() not in str(caught.value)


def test_only_one_token_is_given() -> None:
    with pytest.raises(ValueError, match="either"):
        Token(SECRET, "file")


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="go together"):
        tls_credentials(certificate=tmp_path / "a.pem")


async def run(*arguments: str, **environment: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paged.cli", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    _, said = await process.communicate()
    return process.returncode, said.decode()


async def test_the_command_line_says_in_a_line_what_it_cannot_use() -> None:
    code, said = await run("--token-file", "no/such/file", "info")
    assert (code, said.count("\n")) == (1, 1)
    assert "no/such/file" in said
    code, said = await run("info", "--address", "scheduler.test:1", PAGED_TOKEN=SECRET)
    assert (code, said.count("\n")) == (1, 1)
    assert "unencrypted" in said
    assert SECRET not in said
