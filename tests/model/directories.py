"""Directories of models, and changes to them that a test makes."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from executor_svc.model.load import load
from executor_svc.model.refusal import ModelRefused
from tests.model.conftest import settings_for

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def edit_json(file: Path, **changes) -> None:
    """A change to `...` takes the entry out."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def edit_weights(directory: Path, edit) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def split(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    halves = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, half in halves.items():
        save_file({name: weights[name] for name in half}, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    places = {name: file for file, half in halves.items() for name in half}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def refusal(directory: Path, **settings) -> str:
    with pytest.raises(ModelRefused) as refused:
        load(settings_for(directory, **settings))
    return str(refused.value)


SAFETENSORS = {"one file": lambda directory: None, "several files and their index": split}
