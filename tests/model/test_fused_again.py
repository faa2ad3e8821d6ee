"""What a model's modules were replaced by is done again of what is kept of it, and computes the same to the bit."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from executor_svc.model.fused import HeadRule, OtherResults, Products, Recipe, Replaced, fuse_again
from executor_svc.model.proof import prove
from kernels import native_backend
from kernels.cpu.linear import is_native
from tests.model.fused_models import BF16, LEVEL, MAX_LEN, family, fused, needs_native_products, random_model

FAMILIES = ["llama", "qwen3", "phi3", "glm", "gemma2", "gpt_oss", "cohere", "gpt_neox", "gpt2", "granite", "qwen2"]


def as_kept(recipe: Recipe) -> Recipe:
    plain = json.loads(json.dumps(asdict(recipe)))
    head = None if plain["head"] is None else HeadRule(**plain["head"])
    return Recipe(**plain | {"head": head, "replaced": [Replaced(**own) for own in plain["replaced"]]})


def again(model, recipe, *, int8=False):
    return fuse_again(model, prove(model, MAX_LEN), native_backend(LEVEL), Products(LEVEL, int8), MAX_LEN, recipe)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_modules_are_replaced_and_compute_the_same(name):
    for dtype in (torch.float32, BF16):
        if dtype == BF16 and not is_native(LEVEL, BF16):
            continue
        first = fused(random_model(family(name), dtype))
        second = again(random_model(family(name), dtype), as_kept(first.recipe))  # which compares results
        assert second.replaced == first.replaced
        assert second.recipe == as_kept(first.recipe)
        assert (second.greedy is None) == (first.greedy is None)
        if first.greedy is not None:
            assert second.greedy.soft_cap == first.greedy.soft_cap


@needs_native_products
def test_in_8_bits_too():
    recipe = as_kept(fused(random_model(family("llama"), BF16), int8=True).recipe)
    assert again(random_model(family("llama"), BF16), recipe, int8=True).replaced
    with pytest.raises(OtherResults):
        again(random_model(family("llama"), BF16), recipe, int8=False)


def test_one_weight_that_is_another_is_noticed():
    recipe = as_kept(fused(random_model(family("llama"))).recipe)
    model = random_model(family("llama"))
    model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.5
    with pytest.raises(OtherResults, match="small steps"):
        again(model, recipe)


@needs_native_products
def test_what_is_known_of_a_module_is_what_it_is_replaced_by():
    """A wrong entry is another model, and is noticed by its results."""
    recipe = as_kept(fused(random_model(family("llama"), BF16)).recipe)
    for changed in (
        replace(recipe, replaced=[one for one in recipe.replaced if one.kind != "norm"][:-2]),
        replace(recipe, replaced=[_other_eps(one) for one in recipe.replaced]),
        replace(recipe, head=HeadRule(soft_cap=0.01)),
        replace(recipe, digest="0" * 64),
    ):
        with pytest.raises(OtherResults):
            again(random_model(family("llama"), BF16), changed)


def _other_eps(one: Replaced) -> Replaced:
    return replace(one, values=one.values | {"eps": 0.3}) if one.kind == "norm" else one


@pytest.mark.parametrize(
    "entry", [("norm", "model.layers.7.norm", {}), ("cake", "model.norm", {}), ("linear", "model.norm", {})]
)
def test_a_module_that_is_not_there_is_an_error(entry):
    recipe = as_kept(fused(random_model(family("llama"))).recipe)
    with pytest.raises((AttributeError, KeyError, ValueError)):
        again(random_model(family("llama")), replace(recipe, replaced=[Replaced(*entry)]))
