"""Nothing listens beyond this machine without guards, and the message says what to set."""

from pathlib import Path

import pytest

from executor_svc.settings import parse
from scheduler_svc.__main__ import main
from scheduler_svc.settings import parse_settings
from tests.security.keys import Keys

BEYOND = ["0.0.0.0:50051", "[::]:0", "10.0.0.1:1", "scheduler.test:1", "127.evil.test:1", "unix:/tmp/x:1"]
LOOPBACK = ["127.0.0.1:0", "127.9.9.9:1", "[::1]:1", "localhost:1"]


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_settings(flags)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("address", BEYOND)
def test_a_scheduler_does_not_listen_beyond_this_machine_unguarded(
    address: str, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--listen-address", address]
    tls, client_ca, tokens = keys.scheduler_flags[:4], keys.scheduler_flags[4:6], keys.scheduler_flags[6:]
    said = refusal(where, capsys)
    assert address in said
    for remedy in ("--tls-certificate", "--tls-private-key", "--token-file", "--tls-client-ca", "--insecure"):
        assert remedy in said
    assert "--token-file" in (said := refusal([*where, *tls], capsys))
    assert "--tls-certificate and" not in said
    assert "--tls-certificate" in (said := refusal([*where, *tokens], capsys))
    assert "--token-file" not in said
    for enough in ([*tls, *tokens], [*tls, *client_ca], ["--insecure"]):
        assert parse_settings([*where, *enough]).listen_address == address


def test_metrics_are_read_on_this_machine_unless_told_otherwise(keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    beyond, here = ["--metrics-address", "0.0.0.0:1"], ["--metrics-address", "127.0.0.1:1"]
    guarded = [*keys.scheduler_flags, "--listen-address", "0.0.0.0:1"]
    assert "--metrics-address 0.0.0.0:1" in refusal([*guarded, *beyond], capsys)
    for flags in ([*guarded, *here], [*guarded, *beyond, "--insecure"]):
        assert parse_settings(flags).metrics_address == flags[len(guarded) + 1]
    with pytest.raises(SystemExit):
        parse(["--simulate", *keys.executor_flags, *beyond])
    assert "--metrics-address 0.0.0.0:1" in capsys.readouterr().err
    parse(["--simulate", *keys.executor_flags, *here])
    parse(["--simulate", *keys.executor_flags, *beyond, "--insecure"])


@pytest.mark.parametrize(
    "endpoint", ["tcp://executor:5555", "tcp://10.0.0.1:1", "tcp://127.evil.test:1", "ipc://@plans"]
)
def test_a_scheduler_does_not_drive_executors_elsewhere_unguarded(
    endpoint: str, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--executor-endpoint", f"tcp://127.0.0.1:5555,{endpoint}"]
    for flags in (where, [*where, *keys.scheduler_flags]):  # those guard the other side
        said = refusal(flags, capsys)
        assert f"--executor-endpoint {endpoint} is" in said
        for remedy in ("--curve-key-file", "--curve-executor-key", "paged keys create", "--insecure"):
            assert remedy in said
    for enough in (keys.link_flags, ["--insecure"]):
        assert parse_settings([*where, *enough]).executor_endpoints[1] == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555,tcp://[::1]:1", "tcp://localhost:1", "ipc:///run/paged/x"])
def test_executors_on_this_machine_need_nothing(endpoint: str) -> None:
    assert parse_settings(["--executor-endpoint", endpoint]).insecure is False


@pytest.mark.parametrize("address", LOOPBACK)
def test_on_this_machine_a_scheduler_needs_nothing(address: str) -> None:
    assert parse_settings(["--listen-address", address]).insecure is False


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (slice(0, 2), "--tls-certificate and --tls-private-key go together"),
        (slice(4, 6), "--tls-client-ca needs --tls-certificate"),
        (slice(8, 10), "--curve-key-file and --curve-executor-key go together"),
    ],
)
def test_half_of_a_guard_is_refused(kept: slice, named: str, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refusal([*keys.scheduler_flags, *keys.link_flags][kept], capsys)


def ruin(file: Path, keys: Keys) -> None:
    contents = {
        "server-key.pem": (keys.tls / "client-key.pem").read_text(),  # of another certificate
        "ca.pem": "nothing",
        "tokens.toml": f'[[tokens]]\nname = "{keys.operator}',
        "scheduler.key_secret": (keys.curve / "scheduler.key").read_text(),
    }
    file.write_text(contents[file.name])


@pytest.mark.parametrize(
    "file", ["tls/server-key.pem", "tls/ca.pem", "tokens.toml", "curve/scheduler.key_secret", "tls/server.pem"]
)
def test_a_guard_that_cannot_be_used_ends_the_start_and_is_named(
    file: str, keys: Keys, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, path = keys.operator, keys.directory / file
    if file == "tls/server.pem":
        path.unlink()
    else:
        ruin(path, keys)
    flags = [*keys.scheduler_flags, *keys.link_flags, "--listen-address", "127.0.0.1:0"]
    monkeypatch.setattr("sys.argv", ["paged-scheduler", *flags])
    monkeypatch.setattr("scheduler_svc.__main__.configure_logs", lambda *_: None)  # it would be for all tests to come
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert str(path) in said
    assert operator not in said
