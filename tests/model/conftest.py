import random
import shutil

import pytest
import torch
import transformers

from executor_svc.model.load import load
from executor_svc.ranks import ONE
from executor_svc.settings import ExecutorSettings
from tests.margin import reference_model
from tests.tiny_models import CONFIGS, VOCAB_SIZE, save_tiny

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # tiny products are slower on several

MAX_ROWS = 16
BLOCK_SIZE = 4


def settings_for(directory, **changes) -> ExecutorSettings:
    defaults = {"num_blocks": 600, "block_size": BLOCK_SIZE, "max_rows": MAX_ROWS, "tokens_per_step": 32}
    served = {"dtype": "float32", "device": "cpu", "kept_proofs": False}  # each load is to prove what it loads
    return ExecutorSettings(model=str(directory), **{**served, **defaults, **changes})


def random_ids(seed: int, count: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(vocab_size) for i in range(count)]


@pytest.fixture(scope="session")
def tiny_directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny(root, family) for family in CONFIGS}


@pytest.fixture
def directory(tiny_directories, tmp_path):
    """A copy of the tiny Llama that a test may change."""
    return shutil.copytree(tiny_directories["llama"], tmp_path / "llama")


class Model:
    """A tiny model twice: as served, and as transformers has it."""

    def __init__(self, directory, dtype=torch.float32, ranks=ONE, **settings):
        self.loaded = load(settings_for(directory, dtype=str(dtype).removeprefix("torch."), **settings), ranks)
        self.reference = reference_model(directory, dtype)


@pytest.fixture(scope="session", params=list(CONFIGS))
def model(request, tiny_directories):
    return Model(tiny_directories[request.param])


@pytest.fixture(scope="session")
def llama(tiny_directories):
    return Model(tiny_directories["llama"])
