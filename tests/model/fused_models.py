"""Tiny models with random weights, and what is replaced in them."""

import copy

import pytest
import torch
import transformers

from executor_svc.model import attention
from executor_svc.model.fused import Products, fuse
from executor_svc.model.proof import prove
from kernels import Rows, native_backend
from kernels.cpu import supported
from kernels.cpu.linear import is_native
from tests.model.families import SERVED, tiny_config
from tests.tiny_models import TINY_DECODER

MAX_LEN = 64
LEVEL = supported()[0]
BF16 = torch.bfloat16
needs_native_products = pytest.mark.skipif(not is_native(LEVEL, BF16), reason="no native kernels for this CPU")


def random_model(config, dtype=torch.float32):
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # a model notes its attention function there
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones, or zeros, would hide what is done with them
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def family(name, **changes):
    return tiny_config(name, SERVED[name] | changes)


def fused(model, *, int8=False):
    return fuse(model, prove(model, MAX_LEN), native_backend(LEVEL), Products(LEVEL, int8), MAX_LEN)


def llama(dtype=torch.float32, **changes):
    return random_model(transformers.LlamaConfig(**TINY_DECODER | changes), dtype)


def one_step(model, layers, ids):
    """What a model is to be given for one row in one step, for which it is made ready."""
    current, backend = attention.CurrentStep(), native_backend(LEVEL)
    attention.register()
    model.set_attn_implementation(attention.ATTENTION_NAME)
    for layer in layers:
        caches = backend.allocate_caches(
            2, MAX_LEN, layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.dtype, model.device
        )
        attention.attach(layer.module, attention.PagedLayer(backend, *caches, current, layer.window))
    current.tensors = attention.StepTensors(
        MAX_LEN + torch.arange(len(ids)),
        Rows(
            block_tables=torch.ones(1, 1, dtype=torch.int32),
            query_start=torch.tensor([0, len(ids)], dtype=torch.int32),
            context_lens=torch.tensor([len(ids)], dtype=torch.int32),
        ),
    )
    return {"input_ids": ids[None], "position_ids": torch.arange(len(ids))[None], "use_cache": False}
