"""A bad setting ends the start with code 2 and a message that names it."""

import pytest

from executor_svc.settings import parse


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--model or --simulate"]),
        (["--simulate", "--model", "x"], ["--model or --simulate"]),
        (["--simulate", "--tokens-per-step", "256"], ["tokens_per_step 256", "max_rows 256"]),
        (["--simulate", "--block-size", "12"], ["block_size 12", "16"]),
        (["--simulate", "--block-size", "512"], ["--block-size", "PAGED_EXECUTOR_BLOCK_SIZE", "512", "256"]),
        (["--simulate", "--endpoint", "udp://x:1"], ["--endpoint", "udp://x:1", "tcp://HOST:PORT"]),
        (["--simulate", "--endpoint", "tcp://127.0.0.1"], ["--endpoint", "port"]),
        (["--simulate", "--endpoint", "tcp://127.0.0.1:70000"], ["--endpoint", "port"]),
        (["--simulate", "--max-rows", "many"], ["--max-rows", "many"]),
        (["--simulate", "--num-blocks", "1"], ["--num-blocks", "2"]),
        (["--simulate", "--simulate-eos-id", "32000"], ["simulate_eos_id 32000", "simulate_vocab_size 32000"]),
        (["--simulate", "--session-timeout-s", "0"], ["--session-timeout-s", "greater than 0"]),
    ],
)
def test_a_bad_value_is_named(arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    for part in parts:
        assert part in message


def test_flags_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_EXECUTOR_MAX_ROWS", "7")
    monkeypatch.setenv("PAGED_EXECUTOR_BLOCK_SIZE", "8")
    settings = parse(["--simulate", "--block-size", "4"])
    assert (settings.max_rows, settings.block_size) == (7, 4)


def test_a_bad_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGED_EXECUTOR_MAX_ROWS", "many")
    with pytest.raises(SystemExit):
        parse(["--simulate"])
    assert "PAGED_EXECUTOR_MAX_ROWS" in capsys.readouterr().err
