"""What is imported before a model is loaded, and what is left out."""

import gc
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from executor_svc import imports

PLAIN = '{"architectures": ["Gemma3ForCausalLM"]}'
QUANTISED = '{"architectures": ["Gemma3ForCausalLM"], "quantization_config": {"quant_method": "torchao"}}'


@pytest.fixture(autouse=True)
def torchao_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao")


def checkpoint(directory: Path, config: str) -> str:
    (directory / "config.json").write_text(config)
    return str(directory)


def is_left_out() -> bool:
    """As transformers asks, and as an import would find it."""
    left_out = "torchao" in sys.modules
    if left_out:
        assert find_spec("torchao") is None
        with pytest.raises(ModuleNotFoundError):
            import torchao  # noqa: F401
    return left_out


def test_torchao_is_left_out_where_a_checkpoint_does_not_name_it(tmp_path: Path) -> None:
    imports.leave_out_torchao(checkpoint(tmp_path, PLAIN), trust_remote_code=False)
    assert is_left_out()


def test_torchao_is_left_out_for_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    imports.leave_out_torchao(str(file), trust_remote_code=False)
    assert is_left_out()


def test_torchao_stays_for_a_checkpoint_that_names_it(tmp_path: Path) -> None:
    imports.leave_out_torchao(checkpoint(tmp_path, QUANTISED), trust_remote_code=False)
    assert not is_left_out()


def test_torchao_stays_where_a_models_own_code_may_want_it(tmp_path: Path) -> None:
    imports.leave_out_torchao(checkpoint(tmp_path, PLAIN), trust_remote_code=True)
    assert not is_left_out()


@pytest.mark.parametrize("model", ["google/gemma-3-270m", "/nowhere", "a\0b", "~nobody-of-this-name/model"])
def test_torchao_stays_where_the_checkpoint_cannot_be_looked_at(model: str) -> None:
    imports.leave_out_torchao(model, trust_remote_code=False)
    assert not is_left_out()


def test_what_is_imported_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", sys)
    imports.leave_out_torchao(checkpoint(tmp_path, PLAIN), trust_remote_code=False)
    assert sys.modules["torchao"] is sys


def test_no_garbage_is_looked_for_while_imports_last_or_among_what_they_brought() -> None:
    try:
        with imports.for_good():
            assert not gc.isenabled()
            brought: list[object] = []
        assert gc.isenabled()
        assert not any(thing is brought for thing in gc.get_objects())
    finally:
        gc.unfreeze()


def test_collections_go_on_after_an_import_that_fails() -> None:
    try:
        with pytest.raises(ModuleNotFoundError), imports.for_good():
            import no_such_package  # noqa: F401
        assert gc.isenabled()
    finally:
        gc.unfreeze()
