"""What a sequence is given does not depend on who else is in its steps, with experts or without.

In bf16 a product of other shape may round otherwise, and a token whose two best experts are nearly equal may go to the
other one; so there the allowance is wider, and choices are compared where they are clear.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.conftest import MAX_ROWS, Model, random_ids
from tests.model.driver import Driver
from tests.model.families import SERVED, tiny_config
from tests.model.test_margin import assert_margin, greedy
from tests.tiny_models import save_model

NUM_OUTPUTS = 6
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # nats between log-probabilities
CLEAR = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # nats between the two most likely tokens
EIGHT_EXPERTS = {"num_experts": 8, "num_local_experts": 8}
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")


ROUTINGS = {
    "as it comes": lambda router: router,
    "four experts of eight get no token": lambda router: router[:1] * torch.linspace(1, 0.1, len(router))[:, None],
    "all tokens to the same experts": torch.zeros_like,  # equal scores, of which the first are taken
    "pairs of equal experts": lambda router: router[: len(router) // 2].repeat_interleave(2, 0),
}
KINDS = [("llama", "as it comes"), *((family, routing) for family in ("mixtral", "qwen2_moe") for routing in ROUTINGS)]


def save_routed(directory, family: str, routing: str):
    save_model(directory, tiny_config(family, SERVED[family] | EIGHT_EXPERTS))
    weights = load_file(directory / "model.safetensors")
    routers = [name for name in weights if name.endswith(ROUTERS)]
    assert len(routers) == (0 if family == "llama" else 2)
    for name in routers:
        weights[name] = ROUTINGS[routing](weights[name]).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def generated(model, sequences):
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS)
    return sequences


def assert_same(alone, together, dtype) -> None:
    for one, other in zip(alone.logprobs, together.logprobs, strict=True):
        (ids, values, _), (other_ids, other_values, _) = one, other
        if ids[0] != other_ids[0]:
            assert values[1] - values[2] <= CLEAR[dtype], "another token was chosen though one was clearly the best"
            return  # what follows has another context
        both = dict(zip(other_ids, other_values, strict=True))
        shared = [(value, both[token]) for token, value in zip(ids, values, strict=True) if token in both]
        assert max(abs(a - b) for a, b in shared) <= ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "routing"), KINDS)
def test_a_sequence_alone_and_among_others(family, routing, dtype, tmp_path):
    model = Model(save_routed(tmp_path, family, routing), dtype)
    prompt = random_ids(1, 9)
    (alone,) = generated(model, [greedy(prompt)])
    for num_others in (1, 3, 7):
        others = [greedy(random_ids(i, 1 + 3 * i)) for i in range(1, num_others + 1)]
        together, *_ = generated(model, [greedy(prompt), *others])
        assert_same(alone, together, dtype)
    if dtype == torch.float32:
        assert_margin(model, alone, *others, num_outputs=NUM_OUTPUTS)
