"""The last layer goes on with the tokens that are wanted, and the head finds the likeliest of their tokens."""

import pytest
import torch

from executor_svc.model.fused import Products, fuse
from executor_svc.model.fused.agreement import error
from executor_svc.model.proof import prove
from kernels import native_backend
from tests.model.fused_models import (
    BF16,
    LEVEL,
    MAX_LEN,
    family,
    fused,
    llama,
    needs_native_products,
    one_step,
    random_model,
)


def asked_for_two(model):
    """Whether the last layer left the others out; what it gave then, and what those two are in a step of all tokens."""
    layers = prove(model, MAX_LEN)
    wanted = fuse(model, layers, native_backend(LEVEL), Products(LEVEL), MAX_LEN).wanted
    tokens = torch.tensor([3, 29])
    with torch.inference_mode():
        inputs = one_step(model, layers, torch.arange(30))
        with wanted.only(tokens):
            some = model.base_model(**inputs).last_hidden_state[0]
            heard = wanted.heard
        return heard, some, model.base_model(**inputs).last_hidden_state[0, tokens]


@needs_native_products
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_the_last_layer_goes_on_with_the_tokens_that_are_wanted(name):
    heard, some, expected = asked_for_two(random_model(family(name), BF16))
    assert heard
    assert error(some, expected) < 2**-8


@needs_native_products
def test_the_last_layer_goes_on_with_all_where_what_follows_looks_at_all():
    model = llama(BF16)
    layers = prove(model, MAX_LEN)
    model.model.norm.register_forward_hook(lambda _module, _inputs, made: made + made.mean(1, keepdim=True))
    wanted = fuse(model, layers, native_backend(LEVEL), Products(LEVEL), MAX_LEN).wanted
    with torch.inference_mode(), wanted.only(torch.tensor([3, 29])):
        assert model.base_model(**one_step(model, layers, torch.arange(30))).last_hidden_state.shape[1] == 30
        assert not wanted.heard


@needs_native_products
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_the_greedy_head_finds_the_largest_logit_and_tells_rows_that_are_not_finite(name):
    model = random_model(family(name), BF16)
    head = fused(model).greedy
    hidden = torch.randn(9, 64, dtype=BF16)
    hidden[4, 7] = torch.nan
    with torch.inference_mode():
        logits = model.lm_head(hidden)[:, :300]
    cap = getattr(model.config, "final_logit_softcapping", None)
    expected = (logits if cap is None else torch.tanh(logits / cap) * cap).argmax(-1)
    expected[4] = -1
    assert torch.equal(head(hidden, 300), expected)


@needs_native_products
def test_no_greedy_head_where_logits_are_not_those_of_the_head():
    model = llama(BF16)
    own = model.forward

    def forward(*args, **kwargs):
        made = own(*args, **kwargs)
        made.logits[..., 5] += 1
        return made

    model.forward = forward
    assert fused(model).greedy is None


@needs_native_products
@pytest.mark.parametrize("shift", [0.3, -torch.inf])
def test_a_single_logit_of_many_that_is_not_the_head_s_is_noticed(shift):
    model = llama(BF16, vocab_size=1 << 16)
    own = model.forward

    def forward(*args, **kwargs):
        made = own(*args, **kwargs)
        made.logits[..., 5] += shift * made.logits.abs().amax(-1)
        return made

    model.forward = forward
    assert fused(model).greedy is None
