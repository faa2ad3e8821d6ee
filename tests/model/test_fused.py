"""Modules that are understood are replaced, others keep their own code; and what a model computes stays what it was."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from executor_svc.model.fused import Products, fuse, norm
from executor_svc.model.fused.agreement import error, is_as_good
from executor_svc.model.fused.output import understand_embedding
from executor_svc.model.fused.pages import give_back
from executor_svc.model.proof import prove
from executor_svc.model.refusal import ModelRefused
from kernels import native_backend
from kernels.cpu.linear import is_native
from tests.model.families import SERVED
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

ALL = {"attention": 2, "norm": 5}
ALL_BF16 = {**ALL, "linear": 1, "mlp": 2, "layer": 2}


@pytest.mark.parametrize(
    ("name", "in_fp32", "in_bf16"),
    [
        ("llama", ALL, ALL_BF16),
        ("qwen3", ALL, ALL_BF16),
        ("phi3", ALL, ALL_BF16),  # merged projections
        ("glm", ALL, ALL_BF16),  # neighbours are turned, of half a head
        ("gemma2", ALL | {"norm": 9}, ALL_BF16 | {"norm": 9, "embedding": 1}),  # norms on both sides
        ("gpt_oss", ALL, ALL | {"linear": 1}),  # sinks; experts
        ("cohere", {"attention": 2}, {"attention": 2, "mlp": 2, "linear": 1, "embedding": 1}),
        ("gpt_neox", {"attention": 2}, {"attention": 2, "linear": 5}),  # queries, keys and values head by head
        ("gpt2", {"attention": 2}, {"attention": 2, "linear": 5, "embedding": 1}),  # transposed weights
        ("granite", ALL, ALL_BF16 | {"layer": 0}),  # additions of its own kind
    ],
)
def test_what_is_understood_is_replaced(name, in_fp32, in_bf16):
    for dtype, expected in ((torch.float32, in_fp32), (BF16, in_bf16)):
        if dtype == BF16 and not is_native(LEVEL, BF16):
            continue
        replaced = fused(random_model(family(name), dtype)).replaced
        assert replaced == {kind: count for kind, count in expected.items() if count}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("olmo", {"clip_qkv": 2.0}),  # a limit on values
        ("ministral3", {}),  # queries are scaled far out
        ("hunyuan_v1_dense", {}),  # norms come after the rotation
        ("stablelm", {}),  # norms of another kind
        ("nanochat", {}),  # norms that are no modules
        ("deepseek_v3", {}),  # latent attention
        ("afmoe", {}),  # a gate on what was attended to
    ],
)
def test_attention_that_does_something_else_keeps_its_own_code(name, changes):
    assert "attention" not in fused(random_model(family(name, **changes))).replaced


def test_a_module_with_a_hook_keeps_its_own_code():
    """As transformers hangs them on for several devices."""
    model = llama()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    model.model.norm.register_forward_pre_hook(lambda *_: None)
    assert fused(model).replaced == {"attention": 1, "norm": 4}


@needs_native_products
def test_weights_that_others_read_stay():
    model = llama(BF16)
    layer = model.model.layers[0].mlp
    layer.register_module("reader", Reader(layer.down_proj))
    layer.forward = lambda x: layer.reader(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x))
    assert fused(model).replaced == ALL_BF16 | {"mlp": 1, "layer": 1, "linear": 3}
    assert layer.down_proj.weight.numel()


class Reader(nn.Module):
    """Has the weight of another."""

    def __init__(self, other):
        super().__init__()
        self.others = [other]

    def forward(self, x):
        return nn.functional.linear(x, self.others[0].weight)


@needs_native_products
def test_weights_in_two_places_stay():
    model = llama(BF16)
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj = first.up_proj
    assert fused(model).replaced == ALL | {"linear": 5}
    assert first.up_proj.weight.numel()


class CalledByName(nn.Module):
    """Calls another as no replacement can be called."""

    def __init__(self, other, name):
        super().__init__()
        self.other, self.name = other, name

    def forward(self, x):
        return self.other(**{self.name: x})


@needs_native_products
def test_a_module_that_is_called_by_names_keeps_its_own_code():
    model = llama(BF16)
    layer = model.model.layers[0]
    layer.mlp = CalledByName(layer.mlp, "x")
    layer.input_layernorm = CalledByName(layer.input_layernorm, "hidden_states")
    replaced = fused(model).replaced
    assert (replaced["mlp"], replaced["norm"], replaced["layer"]) == (1, 4, 1)


class Answering(nn.Module):
    """An MLP of two layers that gives, or raises, what no MLP of its shape does."""

    def __init__(self, answer):
        super().__init__()
        self.gate_up, self.down, self.answer = nn.Linear(64, 96, bias=False), nn.Linear(48, 64, bias=False), answer

    def forward(self, x):
        return self.answer(self.down(nn.functional.silu(self.gate_up(x)[..., :48])), x)


def a_pair(made, x):
    return made, x


def no_answer_for_seven(made, x):
    if x.shape[-2] == 7:  # which nobody has but who tries the module
        raise KeyError("rows")
    return made


@needs_native_products
@pytest.mark.parametrize("answer", [a_pair, no_answer_for_seven])
def test_a_module_that_answers_or_raises_what_nobody_expects_keeps_its_own_code(answer):
    model = llama(BF16)
    layer = model.model.layers[0]
    layer.mlp = Answering(answer).to(BF16).requires_grad_(False)
    if answer is a_pair:
        layer.mlp = nn.Sequential(layer.mlp, First())
    replaced = fused(model).replaced
    assert (replaced["mlp"], replaced["layer"]) == (1, 1)


class First(nn.Module):
    def forward(self, made):
        return made[0]


@needs_native_products
def test_a_model_that_misses_what_was_replaced_is_refused():
    """One module calls a part of another one in a way that nothing tells."""
    model = llama(BF16)
    first, second = (layer.mlp for layer in model.model.layers)
    down = first.down_proj
    second.forward = lambda x: down(second.act_fn(second.gate_proj(x)) * second.up_proj(x))
    with pytest.raises(ModelRefused, match=r"does not run with modules replaced .* set fused_modules to false"):
        fused(model)


@needs_native_products
def test_weights_are_kept_once():
    model = llama(BF16)
    fused(model)
    left = {name for name, parameter in model.named_parameters() if parameter.numel()}
    assert left == {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{i}.{name}_layernorm.weight" for i in range(2) for name in ("input", "post_attention")
    }
    assert (model.dtype, model.device.type, model.lm_head.out_features) == (BF16, "cpu", 320)


@needs_native_products
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3", "gpt2", "mixtral"])
def test_in_bf16_logits_are_as_close_to_fp32_as_the_model_s_own(name):
    replaced, own = distances_to_fp32(family(name))
    print(f"{name}: {replaced:.4f} of what fp32 gives, transformers' own {own:.4f}")
    assert replaced <= own


def of_half_the_tokens(values, exact):
    """Rounding may send a token to another expert, which is far off."""
    return float(torch.stack([torch.tensor(error(*pair)) for pair in zip(values, exact, strict=True)]).median())


@pytest.mark.slow
@needs_native_products
@pytest.mark.parametrize("name", SERVED)
def test_in_bf16_every_family_is_about_as_close_to_fp32_as_its_own(name):
    replaced, own = distances_to_fp32(family(name), measure=of_half_the_tokens)
    assert replaced <= 1.25 * own


@needs_native_products
def test_weights_in_8_bits_are_less_exact():
    wide = {"hidden_size": 320, "intermediate_size": 480, "initializer_range": 0.05}
    in_8_bits, own = distances_to_fp32(family("llama", **wide), int8=True)
    in_16_bits, _ = distances_to_fp32(family("llama", **wide))
    print(f"{in_8_bits:.4f} of what fp32 gives; in 16 bits {in_16_bits:.4f}, transformers' own {own:.4f}")
    assert in_16_bits < in_8_bits < 0.05


@needs_native_products
def test_narrow_layers_keep_16_bits():
    products = Products(LEVEL, int8=True)
    weights = [products.make([torch.randn(outputs, 64, dtype=BF16)], None).weight for outputs in (8, 512)]
    assert [weight.scales is None for weight in weights] == [True, False]


def distances_to_fp32(config, *, int8=False, measure=error):
    """Of logits as they are served, and of the model's own in bf16, from what the same weights give in fp32."""
    # Several rows of 48 tokens: of one, where little is replaced, chance decides which of both is closer.
    rows = torch.randint(320, (8, 48), generator=torch.Generator().manual_seed(0))
    served = random_model(config, BF16)
    layers = prove(served, MAX_LEN)
    fuse(served, layers, native_backend(LEVEL), Products(LEVEL, int8), MAX_LEN)
    with torch.inference_mode():
        own, exact = (
            torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in rows])
            for model in (random_model(config, BF16), random_model(config, BF16).float())
        )
        logits = torch.cat([paged_logits(served, layers, ids) for ids in rows])
        return [measure(values, exact) for values in (logits, own)]


def paged_logits(model, layers, ids):
    """One row, in one step."""
    return model(**one_step(model, layers, ids)).logits[0]


@pytest.mark.parametrize("plus_one", [False, True])
def test_norms_of_either_kind_are_told_apart(plus_one):
    kind = transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm if plus_one else nn.RMSNorm
    module = kind(48, eps=1e-3).requires_grad_(False)
    module.weight.normal_()
    found = norm.understand(module, LEVEL)
    assert (found.plus_one, found.eps) == (plus_one, 1e-3)
    x = torch.randn(3, 2, 48)
    torch.testing.assert_close(found(x), module(x))


@pytest.mark.parametrize("module", [nn.LayerNorm(48, bias=False), nn.RMSNorm((2, 48)), nn.PReLU(48)])
def test_what_is_no_rms_norm_is_not_taken_for_one(module):
    assert norm.understand(module.requires_grad_(False), LEVEL) is None


def test_an_embedding_that_multiplies_its_rows_is_understood():
    module = transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding(320, 64, 0, embed_scale=8.0)
    assert understand_embedding(module.requires_grad_(False)) == (True, torch.tensor(8.0))
    assert understand_embedding(nn.Embedding(320, 64, max_norm=0.1).requires_grad_(False)) == (False, None)


def test_a_replacement_must_come_as_close_as_the_module_does():
    exact = torch.randn(50, 64)
    own = exact.bfloat16()
    assert is_as_good(own, own, exact)
    assert is_as_good((exact * 1.001).bfloat16(), own, exact)
    assert not is_as_good((exact * 1.01).bfloat16(), own, exact)
    assert not is_as_good(exact, own, exact)  # of another type
    assert not is_as_good(exact * 1.0001, exact, exact)
    assert not is_as_good(own * torch.nan, own, exact)


def test_a_model_that_is_no_longer_itself_is_refused(monkeypatch):
    broken = lambda self, x: x * 0.5  # noqa: E731
    monkeypatch.setattr(norm.RMSNorm, "__call__", broken)
    monkeypatch.setattr(norm, "is_as_good", lambda *_: True)
    monkeypatch.setattr(norm, "agrees", lambda *_: True)
    with pytest.raises(ModelRefused, match="set fused_modules to false"):
        fused(llama())


@pytest.mark.parametrize("stored_as", ["model.safetensors", "e3b0c442"])  # in the hub's cache by a hash
def test_pages_of_a_file_are_given_back_and_can_be_read_again(tmp_path, stored_as):
    weight = torch.randn(1 << 20)
    save_file({"weight": weight}, tmp_path / stored_as)
    (tmp_path / "link.safetensors").symlink_to(tmp_path / stored_as)
    with safe_open(tmp_path / "link.safetensors", "pt") as file:
        mapped = file.get_tensor("weight")
    assert torch.equal(mapped, weight)
    before = resident_bytes(stored_as)
    give_back([mapped, weight])
    assert resident_bytes(stored_as) <= before - 0.9 * weight.nbytes
    assert torch.equal(mapped, weight)  # what is no file's is left alone


def resident_bytes(file):
    """Of this process's memory that is `file`'s."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = [i for i, line in enumerate(lines) if line.endswith(file)]
    return sum(int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) << 10 for i in at)
