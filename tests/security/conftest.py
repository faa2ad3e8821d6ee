import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paged import followed
from scheduler_svc.api import server
from scheduler_svc.api.server import ApiServer
from scheduler_svc.settings import SchedulerSettings, parse_settings
from tests.api.conftest import engine
from tests.api.scripted_engine import ScriptedEngine
from tests.security.keys import Keys
from tests.system.conftest import system

__all__ = ["engine", "system"]


@pytest.fixture(autouse=True)
def looks_are_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """At files that may have changed, and at calls that may not go on: what is waited for here comes sooner."""
    monkeypatch.setattr(followed, "LOOK_S", 0.05)
    monkeypatch.setattr(server, "LOOK_S", 0.05)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.make(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture
def keys(made_once: Keys, tmp_path: Path) -> Keys:
    """A test's own, to change as it likes."""
    shutil.copytree(made_once.directory, tmp_path / "keys")
    return Keys(tmp_path / "keys")


@pytest.fixture
def settings(keys: Keys) -> SchedulerSettings:
    return parse_settings(["--listen-address", "127.0.0.1:0", *keys.scheduler_flags])


@pytest.fixture
async def address(engine: ScriptedEngine, settings: SchedulerSettings) -> AsyncIterator[str]:
    """Of a real server over the scripted engine, with all guards."""
    server = ApiServer(engine, settings)
    yield await server.start()
    await server.stop(0.1)
