"""What cannot be served right is refused when it is loaded, with a reason that a user understands."""

import dataclasses
import inspect

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralAttention

from executor_svc.model import looking
from executor_svc.model.attention import PagedLayer
from executor_svc.model.fused import Products, packed_head
from executor_svc.model.proof import prove
from executor_svc.model.refusal import ModelRefused
from executor_svc.model.rehearsal import PACKED_NAME, rehearse
from kernels import backend
from tests.model.conftest import MAX_ROWS, Model, random_ids
from tests.model.driver import Driver
from tests.model.families import SERVED, tiny_config
from tests.model.test_margin import NUM_OUTPUTS, assert_margin, greedy
from tests.tiny_models import TINY_DECODER, WINDOW, save_model

MAX_MODEL_LEN = 256


def random_model(config, dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tiny_llama(dtype=torch.float32):
    return random_model(transformers.LlamaConfig(**TINY_DECODER), dtype)


def understand(model, max_model_len=MAX_MODEL_LEN):
    kernels = backend(model.device)
    with packed_head(model, None if kernels.level is None else Products(kernels.level)):  # as it is loaded
        layers = prove(model, max_model_len)
        rehearse(model, layers, max_model_len, kernels)
    return layers


def refusal(config) -> str:
    with pytest.raises(ModelRefused) as error:
        understand(random_model(config))
    return str(error.value)


def test_a_model_that_never_calls_the_hook_is_refused():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    assert "an attention of its own" in refusal(config)


def test_a_model_with_a_recurrent_state_is_refused():
    assert "state beside keys and values" in refusal(transformers.FalconH1Config(**TINY_DECODER))


def test_tokens_that_meet_outside_of_attention_are_found_whatever_the_model_says_of_itself(monkeypatch):
    monkeypatch.setattr(transformers.FalconH1ForCausalLM, "_is_stateful", False)
    assert "mixes tokens outside of attention" in refusal(transformers.FalconH1Config(**TINY_DECODER))


def test_a_mask_that_no_window_describes_is_refused():
    config = transformers.Llama4TextConfig(
        **TINY_DECODER, head_dim=16, attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=64
    )
    assert "mask that is not a causal one" in refusal(config)


def test_attention_to_later_tokens_is_refused():
    config = transformers.Gemma3TextConfig(**TINY_DECODER, head_dim=16, use_bidirectional_attention=True)
    assert "attends to later tokens" in refusal(config)


class Meddled(LlamaAttention):
    """A layer that passes one more argument to its attention function."""

    extra: dict = {}  # noqa: RUF012

    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options, **self.extra)


@pytest.mark.parametrize(
    "extra", [{"position_bias": torch.ones(1)}, {"is_causal": False}, {"dropout_mask": 1}, {"output_attentions": True}]
)
def test_arguments_that_are_not_understood_are_refused_by_name(extra):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Meddled
        layer.self_attn.extra = extra
    with pytest.raises(ModelRefused, match=f"passes {next(iter(extra))} "):
        prove(model, 256)


def test_a_model_that_makes_its_own_positions_is_refused(monkeypatch):
    model = tiny_llama()
    rotary = model.model.rotary_emb.forward
    counted = torch.arange(11)[None]
    monkeypatch.setattr(model.model.rotary_emb, "forward", lambda x, position_ids: rotary(x, counted))
    with pytest.raises(ModelRefused, match="does not take its positions from position_ids"):
        prove(model, 256)


def test_a_window_that_only_the_mask_knows_is_kept(monkeypatch, tmp_path):
    original = MistralAttention.forward

    def without_window(self, *arguments, **options):
        config, self.config = self.config, transformers.MistralConfig(sliding_window=None)
        self.config._attn_implementation = config._attn_implementation
        try:
            return original(self, *arguments, **options)
        finally:
            self.config = config

    monkeypatch.setattr(MistralAttention, "forward", without_window)
    config = transformers.MistralConfig(**TINY_DECODER, sliding_window=WINDOW)
    assert [layer.window for layer in prove(random_model(config), MAX_MODEL_LEN)] == [WINDOW] * 2
    model, sequence = Model(save_model(tmp_path, config)), greedy(random_ids(1, 3 * WINDOW))
    Driver(model.loaded, MAX_ROWS).generate([sequence], NUM_OUTPUTS, chunk=5)
    assert_margin(model, sequence)


def test_a_window_as_long_as_the_longest_sequence_is_none():
    config = transformers.MistralConfig(**TINY_DECODER, sliding_window=MAX_MODEL_LEN)
    layers = prove(random_model(config), MAX_MODEL_LEN)
    assert all(layer.window in (None, MAX_MODEL_LEN) for layer in layers)


def test_a_layer_that_attends_twice_is_refused():
    config = transformers.DiffLlamaConfig(**TINY_DECODER)
    assert "attends more than once in a layer (4 times in 2 layers)" in refusal(config)


def test_attention_to_chosen_tokens_is_refused():
    assert "chooses by itself which tokens its queries see" in refusal(transformers.DogeConfig(**TINY_DECODER))


def test_positions_that_a_layer_counts_are_found_where_they_would_not_show():
    config = transformers.Llama4TextConfig(
        **TINY_DECODER, head_dim=16, attention_chunk_size=4 * MAX_MODEL_LEN, num_local_experts=2,
        intermediate_size_mlp=64, no_rope_layers=[1, 0], floor_scale=MAX_MODEL_LEN, attn_temperature_tuning=True,
    )  # fmt: skip
    assert "counts the positions of its tokens by itself" in refusal(config)


def meddle(monkeypatch, meddle, kind=LlamaAttention):
    """Each layer of the kind computes with `meddle` of its hidden states, as the model by itself does."""
    original = kind.forward

    def forward(self, hidden_states, *arguments, **options):
        return original(self, meddle(hidden_states), *arguments, **options)

    monkeypatch.setattr(kind, "forward", forward)


MEDDLING = {
    "a sum with the token before, in a ring": lambda hidden: hidden + 0.5 * hidden.roll(1, 1),
    "a step of one token": lambda hidden: hidden.flip(-1) if hidden.shape[1] == 1 else hidden,
    "a scale by the number of tokens": lambda hidden: hidden * hidden.shape[1] ** 0.5,
    "statistics of all tokens": lambda hidden: hidden / hidden.std(1, keepdim=True).clamp_min(0.1),
}


# Of few tokens, and after the first layer's attention.
LATER = {
    "with the token before": lambda hidden: hidden + 0.5 * torch.cat([hidden[:, :1], hidden[:, :-1]], 1),
    "a step of one token": lambda hidden: hidden.flip(-1) if hidden.shape[1] == 1 else hidden,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LATER)
def test_what_goes_wrong_for_few_tokens_after_the_first_attention_is_found_by_rehearsing(monkeypatch, kind, dtype):
    meddle(monkeypatch, LATER[kind], LlamaMLP)
    with pytest.raises(ModelRefused, match="the queries of layer 1"):
        understand(tiny_llama(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("least", [-torch.inf, None], ids=["-inf", "the least number"])
def test_logits_of_tokens_that_a_model_never_wants_hide_nothing_and_are_no_fault(monkeypatch, least, dtype):
    forward, wrong = transformers.LlamaForCausalLM.forward, []

    def hiding(self, *arguments, **options):
        output = forward(self, *arguments, **options)
        if wrong:
            output.logits *= output.logits.shape[1] ** 0.5
        output.logits[..., :5] = torch.finfo(dtype).min if least is None else least
        return output

    hiding.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", hiding)
    assert understand(tiny_llama(dtype))
    wrong.append(True)
    with pytest.raises(ModelRefused, match="the logits differ"):
        understand(tiny_llama(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MEDDLING)
def test_what_depends_on_the_other_tokens_of_a_step_is_found_by_rehearsing(monkeypatch, kind, dtype):
    understand(tiny_llama(dtype))
    meddle(monkeypatch, MEDDLING[kind])
    with pytest.raises(ModelRefused, match="would be served wrong"):
        understand(tiny_llama(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_model_does_around_its_body_is_found_missing_where_nobody_samples(monkeypatch, dtype):
    forward = transformers.LlamaForCausalLM.forward

    def later(self, input_ids, position_ids=None, **options):
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        return forward(self, input_ids, position_ids=positions + 1, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", later)
    with pytest.raises(ModelRefused, match="the queries of layer 0"):
        understand(tiny_llama(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_hundreds_are_not_taken_for_a_fault(dtype):
    """The model's own attention is coarse there, as in Qwen 2, whose keys have large biases."""
    model = random_model(tiny_config("qwen2", {}), dtype)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.data.normal_().mul_(20)
        layer.self_attn.k_proj.bias.data.normal_().mul_(200)
    assert understand(model)


@pytest.mark.parametrize("vocab_size", [1, 2])
def test_a_model_of_hardly_any_tokens_is_understood(vocab_size):
    config = transformers.LlamaConfig(
        **TINY_DECODER | {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    )
    assert understand(random_model(config))


def test_values_that_are_no_numbers_are_not_forgotten_when_later_ones_are(monkeypatch):
    model = tiny_llama()
    model.model.layers[0].self_attn.v_proj.weight.data.fill_(torch.inf)
    with pytest.raises(ModelRefused, match="differ by nan in the values"):
        prove(model, MAX_MODEL_LEN)


def test_room_for_a_limited_number_of_tokens_is_found_by_rehearsing(monkeypatch):
    meddle(monkeypatch, lambda hidden: hidden * (torch.ones(hidden.shape[1]).cumsum(0) <= 13)[:, None])
    with pytest.raises(ModelRefused, match="would be served wrong: the queries of layer 0"):
        understand(tiny_llama())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_does_more_than_its_arguments_say_is_found_by_rehearsing(monkeypatch, dtype):
    code = transformers.models.llama.modeling_llama
    eager = code.eager_attention_forward

    def sharper(module, query, *arguments, **options):
        return eager(module, query * 1.5, *arguments, **options)

    monkeypatch.setattr(code, "eager_attention_forward", sharper)
    with pytest.raises(ModelRefused, match=r"attention of layer 0 \(LlamaAttention\) differ"):
        understand(tiny_llama(dtype))


LOST = {
    "gemma2": {"soft_cap": None},
    "gpt_oss": {"sinks": None},
    "granite": {"scale": 0.25},
    "mistral": {"window": None},
    "phimoe": {"window": WINDOW + 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LOST)
def test_an_option_that_our_own_attention_loses_is_found_by_rehearsing(monkeypatch, family, dtype):
    attend = PagedLayer.attend

    def forgetful(self, *heads_and_rule):
        *heads, rule = heads_and_rule
        return attend(self, *heads, dataclasses.replace(rule, **LOST[family]))

    model = random_model(tiny_config(family, SERVED[family]), dtype)
    understand(model)
    monkeypatch.setattr(PagedLayer, "attend", forgetful)
    with pytest.raises(ModelRefused, match="the attention of layer "):
        understand(model)


def test_a_position_that_is_off_by_one_is_found_by_rehearsing(monkeypatch):
    model, forward = tiny_llama(), looking.forward

    def late(model, name, look, tokens, **inputs):
        shift = 1 if name == PACKED_NAME and len(tokens) == 2 else 0  # decoding alone
        if "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"] + shift
        return forward(model, name, look, tokens, **inputs)

    monkeypatch.setattr(looking, "forward", late)
    with pytest.raises(ModelRefused, match="the queries of layer 0"):
        understand(model)


@pytest.mark.parametrize("max_model_len", [1, 2, 7, 19])
def test_a_model_of_very_short_sequences_is_rehearsed_with_what_it_can_take(max_model_len):
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=max_model_len)
    assert len(understand(random_model(config), max_model_len)) == 2


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_rounding_of_a_deep_model_is_not_taken_for_a_fault(family):
    """This CPU rounds a product alike whatever its shape, so rounding as of a GPU is added."""
    config = tiny_config(family, SERVED[family] | {"num_hidden_layers": 32})
    model, generator = random_model(config, torch.bfloat16), torch.Generator().manual_seed(1)

    def rounded(module, inputs, output):
        return (output * (1 + 2**-9 * torch.randn(output.shape, generator=generator))).to(output.dtype)

    layers = prove(model, MAX_MODEL_LEN)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(rounded)
    rehearse(model, layers, MAX_MODEL_LEN, backend(model.device))
    assert len(layers) == 32
