"""While a model is checked its head's product is the native one, of the same weights; afterwards it is what it was."""

import pytest
import torch

from executor_svc.model import load, understanding
from executor_svc.model.fused import Products, packed_head
from executor_svc.model.fused.agreement import ROUNDING, error
from tests.model.conftest import settings_for
from tests.model.fused_models import BF16, LEVEL, family, needs_native_products, random_model

IDS = torch.arange(5)


def logits_of(model):
    with torch.inference_mode():
        return model(input_ids=IDS[None], use_cache=False).logits[0]


@needs_native_products
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])  # untied, tied with a cap, tied
def test_logits_are_what_they_were_but_for_rounding(name):
    model = random_model(family(name), BF16)
    own = logits_of(model)
    with packed_head(model, Products(LEVEL, int8=True)):  # which is not for checks
        assert "forward" in vars(model.get_output_embeddings())
        found = logits_of(model)
    assert found.dtype == own.dtype
    assert error(found, own) <= ROUNDING
    assert torch.equal(logits_of(model), own)


@needs_native_products
def test_equal_rows_have_equal_logits_however_many_there_are():
    model = random_model(family("llama"), BF16)
    hidden = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(BF16)
    with packed_head(model, Products(LEVEL)), torch.inference_mode():
        made = [model.lm_head(hidden.expand(rows, -1)[None])[0] for rows in range(1, 24)]
    assert all(torch.equal(row, made[0][0]) for logits in made for row in logits)


@needs_native_products
def test_the_head_is_itself_again_after_an_error():
    model = random_model(family("llama"), BF16)
    with pytest.raises(RuntimeError, match="in between"), packed_head(model, Products(LEVEL)):
        raise RuntimeError("in between")
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize(("dtype", "products"), [(torch.float32, Products(LEVEL)), (BF16, None)])
def test_other_heads_stay_as_they_are(dtype, products):
    model = random_model(family("llama"), dtype)
    with packed_head(model, products):
        assert "forward" not in vars(model.lm_head)


@needs_native_products
def test_a_model_is_checked_with_it(tiny_directories, monkeypatch):
    packed, rehearse = [], understanding.rehearse

    def noted(model, *rest):
        packed.append("forward" in vars(model.lm_head))
        rehearse(model, *rest)

    monkeypatch.setattr(understanding, "rehearse", noted)
    load.load(settings_for(tiny_directories["llama"], dtype="bfloat16"))
    assert packed == [True]
