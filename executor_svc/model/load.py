"""The real model, ready to serve: loaded, proved to be understood, given its memory, and warmed up."""

from pathlib import Path

import structlog
from transformers import PreTrainedModel

from executor_svc.loaded import LoadedModel
from executor_svc.model import attention, loading, quantized, rotary
from executor_svc.model.bundle import make_bundle
from executor_svc.model.checkpoint import check_directory
from executor_svc.model.facts import gather_facts, model_len, rope_switch_len, vocab_size
from executor_svc.model.memory import KVMemory, block_bytes, choose_num_blocks, fit_model_len, step_bytes, useful_blocks
from executor_svc.model.proof import ProvenLayer, prove
from executor_svc.model.rehearsal import rehearse
from executor_svc.model.runner import ModelRunner
from executor_svc.model.warm_up import warm_up
from executor_svc.settings import ExecutorSettings
from kernels import Backend, backend

log = structlog.get_logger(__name__)


def load(settings: ExecutorSettings) -> LoadedModel:
    """Everything that an executor needs of `settings.model`. Raises ModelRefused."""
    loading.refuse_foreign_kernels()
    device = loading.choose_device(settings.device)
    name, trust = settings.model or "", settings.trust_remote_code
    directory = loading.find_directory(name, settings.cache_dir, trust_remote_code=trust)
    stored = check_directory(directory)
    config = loading.load_config(directory, trust_remote_code=trust)
    tokenizer = loading.load_tokenizer(directory, trust_remote_code=trust)
    quantized.prepare(directory, config, stored)
    model = loading.load_model(directory, config, settings.dtype, device, trust_remote_code=trust)
    max_model_len = model_len(model.config, settings.max_model_len)
    kernels = backend(device)
    layers = prove(model, max_model_len)
    rehearse(model, layers, max_model_len, kernels)
    num_ids = vocab_size(model, tokenizer)

    num_blocks = choose_num_blocks(
        block_bytes(layers, settings.block_size),
        _step_bytes(model, settings),
        device,
        num_blocks=settings.num_blocks,
        kv_bytes=settings.kv_memory,
        most_blocks=useful_blocks(settings.max_rows, max_model_len, settings.block_size),
    )
    max_model_len = fit_model_len(max_model_len, num_blocks, settings.block_size)
    memory = KVMemory.allocate(layers, num_blocks, settings.block_size, device)
    switch_len = rope_switch_len(model.config, max_model_len)
    long_tokens = rotary.install(model, switch_len)
    runner = ModelRunner(
        model,
        memory,
        _serve_with(kernels, model, layers, memory),
        kernels,
        vocab_size=num_ids,
        max_rows=settings.max_rows,
        long_tokens=long_tokens,
        rope_switch_len=switch_len,
    )
    facts = gather_facts(
        model,
        tokenizer,
        directory,
        served_name=settings.served_name or Path(name).name.removesuffix(".gguf"),
        max_model_len=max_model_len,
        block_size=settings.block_size,
    )
    warm_up_ms = warm_up(
        runner,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_rows=settings.max_rows,
        tokens_per_step=settings.tokens_per_step,
        max_model_len=max_model_len,
    )
    log.info(
        "model_loaded",
        architecture=facts.architecture,
        dtype=facts.dtype,
        device=str(device),
        kernels=kernels.name,
        num_layers=len(layers),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        warm_up_ms=warm_up_ms,
    )
    return LoadedModel(runner, facts, make_bundle(directory, tokenizer), num_blocks, warm_up_ms)


def _serve_with(
    kernels: Backend, model: PreTrainedModel, layers: list[ProvenLayer], memory: KVMemory
) -> attention.CurrentStep:
    """Give each attention layer its caches, and the model our attention function."""
    attention.register()
    model.set_attn_implementation(attention.ATTENTION_NAME)
    current = attention.CurrentStep()
    for layer, (key_cache, value_cache) in zip(layers, memory.layers, strict=True):
        attention.attach(layer.module, attention.PagedLayer(kernels, key_cache, value_cache, current, layer.window))
    return current


def _step_bytes(model: PreTrainedModel, settings: ExecutorSettings) -> int:
    config = model.config.get_text_config()
    widths = [config.hidden_size, getattr(config, "intermediate_size", None), getattr(config, "ffn_dim", None)]
    return step_bytes(
        tokens_per_step=settings.tokens_per_step,
        max_rows=settings.max_rows,
        widest_layer=max(width for width in [*widths, 4 * config.hidden_size] if width),
        vocab_size=config.vocab_size,
        itemsize=model.dtype.itemsize,
    )
