"""A bad setting is named, and the process does not start."""

from pathlib import Path

import pytest

from scheduler_svc.settings import SchedulerSettings, parse_settings


def test_flags_win_over_the_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_SCHEDULER_MAX_WAITING_REQUESTS", "7")
    monkeypatch.setenv("PAGED_SCHEDULER_MAX_LOGPROBS", "5")
    settings = parse_settings(["--max-waiting-requests", "9", "--no-prefix-caching", "--listen-address", "[::1]:0"])
    assert (settings.max_waiting_requests, settings.max_logprobs, settings.max_losses) == (9, 5, 2)
    assert settings.prefix_caching is False
    assert settings.listen_address == "[::1]:0"


@pytest.mark.parametrize("said", ['{"gold": 3, "trial": 0.5}', "gold=3,trial=0.5"])
def test_weights_of_tenants_are_given_by_name(said: str) -> None:
    assert parse_settings(["--tenant-weights", said]).tenant_weights == {"gold": 3.0, "trial": 0.5}


def test_several_executors_are_given_with_commas_between() -> None:
    settings = parse_settings(
        ["--insecure", "--executor-endpoint", "tcp://executor:5555, ipc:///tmp/x,tcp://executor:5555"]
    )
    assert settings.executor_endpoints == ["tcp://executor:5555", "ipc:///tmp/x"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--listen-address", "50051"),
        ("--listen-address", "host:70000"),
        ("--executor-endpoint", "http://localhost"),
        ("--executor-endpoint", "tcp://a:1,b:2"),
        ("--executor-endpoint", "tcp://a:1,"),
        ("--resolve-s", "0"),
        ("--max-waiting-requests", "0"),
        ("--max-model-len", "1"),
        ("--watermark", "nan"),
        ("--result-timeout-s", "inf"),
        ("--executor-wait-s", "-1"),
        ("--max-message-bytes", "many"),
        ("--log-level", "loud"),
        ("--ageing-tokens", "0"),
    ],
)
def test_a_bad_value_exits_with_2_and_names_its_flag(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings([flag, value])
    assert caught.value.code == 2
    assert f"{flag} " in (said := capsys.readouterr().err)
    assert value in said


@pytest.mark.parametrize("said", ['{"a": 0}', "a=much", "a=inf", "x" * 129 + "=1", "é=1", "a"])
def test_a_bad_weight_exits_with_2_and_names_the_flag(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(["--tenant-weights", said])
    assert caught.value.code == 2
    assert "--tenant-weights " in capsys.readouterr().err


def test_an_unknown_flag_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(["--max-waiting", "5"])
    assert caught.value.code == 2
    assert "--max-waiting" in capsys.readouterr().err


def test_every_setting_says_in_one_sentence_what_it_does() -> None:
    for name, setting in SchedulerSettings.model_fields.items():
        assert setting.description, name
        assert setting.description.endswith("."), name


def test_each_process_has_a_scheduler_id_of_its_own() -> None:
    assert parse_settings([]).scheduler_id != parse_settings([]).scheduler_id


def test_the_cache_is_in_the_users_home() -> None:
    assert parse_settings([]).cache_dir == Path.home() / ".cache/paged/tokenizers"
