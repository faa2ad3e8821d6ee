"""What README.md and docs/ name is there: flags, commands of ours, files."""

import re

import pytest
import typer.main

from executor_svc.settings import ExecutorSettings
from paged.cli.app import app
from scheduler_svc.settings import SchedulerSettings
from tests.docs.pages import PAGES, ROOT, SHELLS, blocks, inline_code, text_of

# Of programs that are not ours: smg, torchrun, pip, buf, docker.
FOREIGN = {
    *("--api-key", "--discovery-file", "--discovery-provider", "--policy", "--port", "--host", "--worker-urls"),
    "--worker-startup-check-interval",
    *(
        "--nproc-per-node",
        "--nnodes",
        "--standalone",
        "--max-restarts",
        "--rdzv-backend",
        "--rdzv-endpoint",
    ),  # torchrun
    *("--only-binary", "--no-deps", "--no-index", "--find-links", "--target", "--platform", "--python-version"),
    *("--protocol", "--http2-prior-knowledge", "--list-methods", "--data", "--cacert", "--header", "--reflect-header"),
    *("--scale", "--profile", "--build", "--wait", "--detach", "--help", "--version"),
}
OURS = ("paged", "scheduler_svc", "executor_svc", "benchmarks", "reference", "kernels")
NOT_OURS = ("docker", "kubectl", "kustomize", "smg", "prometheus", "grafana", "kind", "debootstrap")


def our_flags() -> set[str]:
    flags = {"--install-completion", "--show-completion"}
    for settings in (SchedulerSettings, ExecutorSettings):
        for name in settings.model_fields:
            flag = name.replace("_", "-")
            flags |= {f"--{flag}", f"--no-{flag}"}
    for directory in OURS:
        for path in (ROOT / directory).rglob("*.py"):
            flags |= set(re.findall(r'"(--[a-z][a-z0-9-]*)', path.read_text()))
    return flags | set(_flags(typer.main.get_command(app)))


def _flags(command: object) -> list[str]:
    own = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    return own + [flag for inner in getattr(command, "commands", {}).values() for flag in _flags(inner)]


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_are_named_exist(page: str) -> None:
    known = our_flags() | FOREIGN
    said = inline_code(page) + [command for block in blocks(page) for command in block.commands]
    ours = [code for code in said if not code.startswith(NOT_OURS)]
    named = {flag for code in ours for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code)}
    assert named <= known, f"{page}: {sorted(named - known)}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_named_exist(page: str) -> None:
    known = set(typer.main.get_command(app).commands)
    said = inline_code(page) + [command for block in blocks(page) for command in block.commands]
    named = {found[1] for code in said if (found := re.match(r"(?:\.venv/bin/)?paged ([a-z]+)", code))}
    assert named <= known


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_linked_are_there(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", text_of(page)):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_languages_of_blocks_are_known() -> None:
    known = {"", *SHELLS, "python", "toml", "json", "yaml", "promql"}
    assert {block.language for page in PAGES for block in blocks(page)} <= known
