"""The examples that need guards, as their page and docs/security.md say. The others are among the page's commands."""

from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, text_of
from tests.shell import Shell

GUARDS = "--tls-certificate keys/tls/server.pem --tls-private-key keys/tls/server-key.pem --token-file keys/tokens.toml"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A scheduler that wants TLS and a token, which is in shop.token."""
    with Shell(tmp_path_factory.mktemp("guarded")) as shell:
        shell.run("paged keys create keys --host localhost --host 127.0.0.1")
        shell.run("paged keys token keys/tokens.toml web-shop --tenant shop --days 90 --out shop.token")
        shell.start("paged-executor --simulate")
        shell.start(f"paged-scheduler {GUARDS}")
        yield shell


def test_the_guarded_one_answers_with_a_token_and_not_without(guarded: Shell) -> None:
    answer, refusal = guarded.run_once_it_works(
        "python examples/guarded.py localhost:50051 keys/tls/ca.pem shop.token"
    ).splitlines()[-2:]
    assert answer
    assert refusal == "without a token: UNAUTHENTICATED"


def test_buf_calls_it_with_a_certificate_and_a_header(guarded: Shell) -> None:
    page = text_of("docs/examples.md")
    flags = '--cacert keys/tls/ca.pem --header "Authorization: Bearer $TOKEN" --reflect-header "*"'
    assert flags in page
    call = f"buf curl --protocol grpc {flags} --data '{{}}' https://localhost:50051/paged.v1.ControlService/ListModels"
    assert guarded.done(call.replace("$TOKEN", "x" * 40)).returncode != 0
    assert '"simulated"' in guarded.run_once_it_works(f"TOKEN=$(cat shop.token); {call}")


def test_all_of_them_are_on_the_page() -> None:
    page = text_of("docs/examples.md")
    for path in (ROOT / "examples").glob("*.py"):
        assert f"| `{path.name}` |" in page
        assert path.name == "guarded.py" or f"\npython examples/{path.name} " in page
