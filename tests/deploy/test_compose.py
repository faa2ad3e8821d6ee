"""Compose files are valid with each override, can be scaled, and ask for what the services have."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from executor_svc.settings import ExecutorSettings
from scheduler_svc.settings import SchedulerSettings
from tests.deploy.manifests import ROOT, USER, commands

BASE = ROOT / "docker-compose.yml"
OVERRIDES = ("compose.gpu.yaml", "compose.simulate.yaml", "compose.tls.yaml")
STACKS = [(), *((override,) for override in OVERRIDES)]
OF_OTHERS = ("prometheus", "grafana")  # their images

Services = dict[str, dict[str, Any]]
everywhere = pytest.mark.parametrize("overrides", STACKS, ids=lambda files: files[0] if files else "alone")


def compose() -> str:
    found = shutil.which("docker-compose", path=str(Path(sys.executable).parent)) or shutil.which("docker-compose")
    if found is None:
        pytest.skip("docker-compose is not here: PyPI has it for Linux on x86-64 alone")
    return found


@cache
def services(overrides: tuple[str, ...]) -> Services:
    """As docker-compose understands the files, all profiles together. Needs no daemon."""
    files = [part for file in (BASE.name, *overrides) for part in ("-f", file)]
    command = [compose(), *files, "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: Services = json.loads(done.stdout)["services"]
    return found


def test_files_follow_the_compose_specification() -> None:
    files = [BASE, *(ROOT / override for override in OVERRIDES)]
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [program, "--builtin-schema", "vendor.compose-spec", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@everywhere
def test_replicas_are_not_in_each_others_way(overrides: tuple[str, ...]) -> None:
    for name in ("scheduler", "executor"):
        service = services(overrides)[name]
        assert "container_name" not in service
        assert "hostname" not in service
        for port in service.get("ports", []):
            first, _, last = port["published"].partition("-")
            assert int(last or first) - int(first) >= 7, f"{name}: {port['published']} has too few ports to scale"


@pytest.mark.parametrize(("variables", "counts"), [({}, (1, 1)), ({"SCHEDULERS": "3", "EXECUTORS": "2"}, (3, 2))])
def test_how_many_there_are_may_stand_in_the_environment(
    variables: dict[str, str], counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"PAGED_{name}", value)
    found = services.__wrapped__(())  # not those that were read before
    assert (found["scheduler"]["scale"], found["executor"]["scale"]) == counts


@everywhere
def test_every_container_may_as_little_as_it_can_do_with(overrides: tuple[str, ...]) -> None:
    for name, service in services(overrides).items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service
        assert "user" not in service, f"{name}: the image says who it is"
    assert f"USER {USER}:{USER}" in (ROOT / "deploy" / "Dockerfile").read_text()


@everywhere
def test_services_have_settings_that_they_start_with(overrides: tuple[str, ...]) -> None:
    scheduler, executor = (services(overrides)[name] for name in ("scheduler", "executor"))
    found = SchedulerSettings(**_settings(scheduler, "PAGED_SCHEDULER_"), _cli_parse_args=False)  # type: ignore[call-arg]
    assert _seconds(scheduler["stop_grace_period"]) > found.shutdown_grace_s
    model = {"simulate": True} if executor["command"] == ["--simulate"] else {"model": "a model"}
    lends = ExecutorSettings(**model, **_settings(executor, "PAGED_EXECUTOR_"))
    assert _seconds(executor["stop_grace_period"]) > lends.shutdown_grace_s
    assert found.executor_endpoint == f"tcp://executor:{lends.endpoint.rpartition(':')[2]}"


@everywhere
def test_services_run_commands_that_there_are(overrides: tuple[str, ...]) -> None:
    known = commands() | {"make-keys", "test"}
    for name, service in services(overrides).items():
        if name in OF_OTHERS:
            continue
        assert set(service.get("entrypoint") or ()) <= known, name
        if "healthcheck" in service:
            assert service["healthcheck"]["test"][1] in known, name


@everywhere
def test_secrets_go_to_those_alone_who_need_them(overrides: tuple[str, ...]) -> None:
    """As volumes: by service, the directories with keys that it can see."""
    seen = {
        name: {volume["target"]: volume.get("read_only", False) for volume in service.get("volumes", [])}
        for name, service in services(overrides).items()
    }
    keys = {name: {place: fixed for place, fixed in all_.items() if "/keys" in place} for name, all_ in seen.items()}
    makes = keys.pop("keys")
    assert len(makes) == 4
    assert {name: places for name, places in keys.items() if places} == {
        "scheduler": {"/keys/scheduler": True},
        "executor": {"/keys/executor": True},
        "client": {"/keys/callers": True},
    }


def _settings(service: dict[str, Any], prefix: str) -> dict[str, Any]:
    found = {name: value for name, value in service["environment"].items() if value is not None}
    assert all(name.startswith(prefix) for name in found), found
    return {name.removeprefix(prefix).lower(): value for name, value in found.items()}


def _seconds(period: str) -> float:
    minutes, _, seconds = period.removesuffix("s").rpartition("m")
    return 60 * float(minutes or 0) + float(seconds)
