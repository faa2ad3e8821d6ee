"""The files of deploy/ and the compose files, read."""

import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
USER = 10001  # as deploy/Dockerfile makes it

Manifest = dict[str, Any]


def documents(file: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def kubernetes_documents() -> list[Manifest]:
    """All but the kustomizations."""
    files = sorted(file for file in KUBERNETES.rglob("*.yaml") if file.name != "kustomization.yaml")
    return [document for file in files for document in documents(file)]


def commands() -> set[str]:
    """Console scripts of the package."""
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
