"""The real model, ready to serve: loaded, proved to be understood, given its memory, and warmed up.

What directory and tokenizer are refused for is found before the weights are read, which may take minutes.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from executor_svc.loaded import LoadedModel
from executor_svc.model import attention, fused, loading, quantized
from executor_svc.model.checkpoint import check_directory
from executor_svc.model.cuda_graphs import record_graphs
from executor_svc.model.device import check_dtype, rank_device, refusing_out_of_memory
from executor_svc.model.facts import gather_facts, model_len, vocab_size
from executor_svc.model.free_memory import outside_share
from executor_svc.model.kept_proof import ProofFile
from executor_svc.model.memory import KVMemory, block_bytes, choose_num_blocks, fit_model_len, step_bytes, useful_blocks
from executor_svc.model.parallel.group import ALONE, Group, ProcessGroup
from executor_svc.model.parallel.runner import FollowingRunner, LeadingRunner
from executor_svc.model.parallel.sharding import warn_of_idle_cores
from executor_svc.model.progress import Progress, shown_progress, silent, transformers_told
from executor_svc.model.proof import ProvenLayer
from executor_svc.model.proof_key import proof_key
from executor_svc.model.ready_tokenizer import load_ready
from executor_svc.model.refusal import ModelRefused
from executor_svc.model.runner import ModelRunner
from executor_svc.model.step_profile import measure_step_bytes
from executor_svc.model.threads import set_threads
from executor_svc.model.understanding import Serving, Understood, understand
from executor_svc.model.warm_up import Room, warm_up
from executor_svc.ranks import ONE, Ranks
from executor_svc.settings import ExecutorSettings
from kernels import Backend, KernelInputError, backend
from kernels.cpu.caches import is_served

log = structlog.get_logger(__name__)

SMALLER_WEIGHTS = "take a smaller or quantised model, or set dtype to a 16-bit type"
LESS_KV_MEMORY = "set num_blocks or kv_memory to less, or lower memory_share"
COMPILING = "compiling kernels"
SMALLER_STEPS = "lower tokens_per_step, max_rows or memory_share"


def load(settings: ExecutorSettings, ranks: Ranks = ONE) -> LoadedModel:
    """Everything that an executor needs of `settings.model`; of several ranks, what rank 0 needs. Raises
    ModelRefused."""
    loading.refuse_foreign_kernels()
    device = _prepared_device(settings, ranks)
    group = ALONE if ranks.size == 1 else ProcessGroup(ranks, device, settings.rank_timeout_s)
    if ranks.size > 1 and device.type == "cpu":
        warn_of_idle_cores(ranks.local_size, torch.get_num_threads(), os.cpu_count() or 1)
    with shown_progress() as progress:
        model = _load(settings, device, group, progress)
    if not isinstance(group, ProcessGroup):
        return model
    runner = LeadingRunner(model.runner, group)
    return replace(model, runner=runner, close=runner.close)


def load_share(settings: ExecutorSettings, ranks: Ranks) -> FollowingRunner:
    """What any other rank needs. Raises ModelRefused."""
    loading.refuse_foreign_kernels()
    device = _prepared_device(settings, ranks)
    group = ProcessGroup(ranks, device, settings.rank_timeout_s)
    return FollowingRunner(_load(settings, device, group, silent).runner, group)


def _prepared_device(settings: ExecutorSettings, ranks: Ranks) -> torch.device:
    device = rank_device(settings.device, ranks)
    if device.type == "cpu":
        set_threads(settings.cpu_threads, ranks.local_size)
    return device


def _load(settings: ExecutorSettings, device: torch.device, group: Group, progress: Progress) -> LoadedModel:
    name, trust = settings.model or "", settings.trust_remote_code
    with group.first_here():
        directory = loading.find_directory(name, settings.cache_dir, trust_remote_code=trust)
        stored = check_directory(directory)
        config = loading.load_config(directory, trust_remote_code=trust)
        tokenizer = load_ready(directory, settings.cache_dir, trust_remote_code=trust)
    quantized.prepare(directory, config, stored)
    saved_bytes = sum(tensor.num_bytes for tensor in stored.values()) // group.ranks.size

    def weights() -> PreTrainedModel:
        with transformers_told(progress, "loading weights"):
            return _load_weights(directory, config, settings, device, saved_bytes, group)

    understood = understand(weights, lambda model: _serving(model, directory, settings, group, progress), progress)
    model, kernels = understood.model, understood.serving.kernels
    max_model_len, layers = understood.serving.max_model_len, understood.layers
    num_ids = vocab_size(model, tokenizer.facts)
    kv_dtype = _kv_dtype(layers, kernels, settings)
    served = _Served(understood, num_ids, settings, group, kv_dtype)

    num_blocks = choose_num_blocks(
        served.block_bytes,
        served.step_bytes(max_model_len) + outside_share(device, settings.memory_share),
        device,
        num_blocks=settings.num_blocks,
        kv_bytes=settings.kv_memory,
        most_blocks=useful_blocks(settings.max_rows, max_model_len, settings.block_size),
        num_sharing=group.ranks.local_size,
    )
    num_blocks = group.least(num_blocks)
    max_model_len = fit_model_len(max_model_len, num_blocks, settings.block_size)
    room = Room(num_blocks, settings.block_size, settings.max_rows, settings.tokens_per_step, max_model_len)
    runner = served.make_runner(num_blocks)
    if served.records_graphs:
        record_graphs(runner, device, room.table_width)
    group.wait_for_all()  # or the time of the first step would be that of waiting
    with refusing_out_of_memory("the largest step", device, needed=None, lower=SMALLER_STEPS):
        warm_up_ms = warm_up(runner, room, compiles=device.type == "cuda", progress=progress)
    facts = gather_facts(
        model,
        tokenizer.facts,
        directory,
        served_name=settings.served_name or loading.name_of(name),
        max_model_len=max_model_len,
        block_size=settings.block_size,
        int8_weights=settings.int8_weights,
        int8_kv=settings.int8_kv,
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
    return LoadedModel(runner, facts, tokenizer.bundle, num_blocks, warm_up_ms)


def _serving(
    model: PreTrainedModel, directory: Path, settings: ExecutorSettings, group: Group, progress: Progress
) -> Serving:
    max_model_len = model_len(model.config, settings.max_model_len)
    kernels = backend(
        model.device, cpu_kernels=settings.cpu_kernels, cache_dir=settings.cache_dir, told=partial(progress, COMPILING)
    )
    group.wait_for_all()  # one of several machines may have compiled kernels; from here on ranks meet in each layer
    _warn_of_slow_kernels(kernels, model.dtype, settings.block_size)
    products = _products(model, kernels, settings)
    kept = None
    if products is not None and _proof_may_be_kept(model, settings, group):
        key = proof_key(model, directory, kernels, products, max_model_len)
        kept = ProofFile(settings.cache_dir, key)
    return Serving(max_model_len, kernels, products, kept)


def _proof_may_be_kept(model: PreTrainedModel, settings: ExecutorSettings, group: Group) -> bool:
    """Of code that comes with a model, of libraries that quantised one, and of ranks that prove together no key says
    enough."""
    is_plain = getattr(model.config, "quantization_config", None) is None
    return settings.kept_proofs and not settings.trust_remote_code and is_plain and group.ranks.size == 1


def _warn_of_slow_kernels(kernels: Backend, dtype: torch.dtype, block_size: int) -> None:
    if kernels.note:
        log.warning("native_kernels_not_used", reason=kernels.note)
    elif kernels.level is not None and not is_served(block_size, dtype):
        reason = f"no layout for blocks of {block_size} slots in {dtype}; one of 16 in float32 or bfloat16 has one"
        log.warning("native_attention_not_used", reason=reason)


def _load_weights(
    directory: Path,
    config: PreTrainedConfig,
    settings: ExecutorSettings,
    device: torch.device,
    saved_bytes: int,
    group: Group,
) -> PreTrainedModel:
    needed = saved_bytes if settings.dtype == "auto" else None  # another type than the saved one takes more or less
    with refusing_out_of_memory("the weights", device, needed=needed, lower=SMALLER_WEIGHTS):
        model = loading.load_model(
            directory, config, settings.dtype, device, trust_remote_code=settings.trust_remote_code, group=group
        )
    check_dtype(model.dtype, device)
    return model


def _products(model: PreTrainedModel, kernels: Backend, settings: ExecutorSettings) -> fused.Products | None:
    """What replaced modules compute with; None where none are. Raises ModelRefused where 8 bits cannot be had."""
    products = None
    if settings.fused_modules and kernels.level is not None:
        products = fused.Products(kernels.level, int8=settings.int8_weights)
    if settings.int8_weights and (products is None or not products.are_native(model.dtype)):
        raise ModelRefused(
            f"int8_weights is set, which takes a model in bfloat16, native kernels of a CPU (the kernels are "
            f"{kernels.name}, the model is in {model.dtype}), and fused_modules; unset it"
        )
    return products


def _kv_dtype(layers: list[ProvenLayer], kernels: Backend, settings: ExecutorSettings) -> torch.dtype | None:
    """What KV memory is of, None for what the layers compute with. Raises ModelRefused where 8 bits cannot be had."""
    if not settings.int8_kv:
        return None
    try:
        block_bytes(layers, settings.block_size, kernels, torch.int8)
    except KernelInputError as error:
        raise ModelRefused(
            f"int8_kv is set, which the kernels ({kernels.name}) cannot serve here ({error}); unset it"
        ) from error
    return torch.int8


@dataclass(frozen=True, slots=True)
class _Served:
    """A model that is understood, and how it is to be served."""

    understood: Understood
    num_ids: int
    settings: ExecutorSettings
    group: Group
    kv_dtype: torch.dtype | None

    @property
    def model(self) -> PreTrainedModel:
        return self.understood.model

    @property
    def layers(self) -> list[ProvenLayer]:
        return self.understood.layers

    @property
    def kernels(self) -> Backend:
        return self.understood.serving.kernels

    @property
    def records_graphs(self) -> bool:
        """What several ranks do together is not recorded: a recording that fails on one would leave it behind."""
        return self.model.device.type == "cuda" and self.settings.cuda_graphs and self.group.ranks.size == 1

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.layers, self.settings.block_size, self.kernels, self.kv_dtype)

    def make_runner(self, num_blocks: int) -> ModelRunner:
        """A runner over new KV memory; it takes the model from any made before. Raises ModelRefused."""
        device, settings, replaced = self.model.device, self.settings, self.understood.fused
        needed = num_blocks * self.block_bytes
        with refusing_out_of_memory("KV memory", device, needed=needed, lower=LESS_KV_MEMORY):
            memory = KVMemory.allocate(
                self.layers, num_blocks, settings.block_size, device, self.kernels, self.kv_dtype
            )
            memory.populate(self.kernels)
        attention.register()
        self.model.set_attn_implementation(attention.ATTENTION_NAME)
        current = attention.CurrentStep()
        for layer, (keys, values) in zip(self.layers, memory.layers, strict=True):
            paged = attention.PagedLayer(self.kernels, keys, values, current, layer.window)
            attention.attach(layer.module, paged)
        return ModelRunner(
            self.model,
            memory,
            current,
            self.kernels,
            vocab_size=self.num_ids,
            max_rows=settings.max_rows,
            long_tokens=self.understood.long_tokens,
            rope_switch_len=self.understood.rope_switch_len,
            agreed=self.group.agreed,
            greedy_head=replaced.greedy if replaced else None,
            wanted=replaced.wanted if replaced else None,
        )

    def step_bytes(self, max_model_len: int) -> int:
        """What a step takes beside weights and KV memory: measured on a GPU, elsewhere estimated."""
        settings, device = self.settings, self.model.device
        if device.type != "cuda":
            return _step_bytes(self.model, settings)
        return measure_step_bytes(
            self.make_runner,
            device,
            block_size=settings.block_size,
            max_rows=settings.max_rows,
            tokens_per_step=settings.tokens_per_step,
            max_model_len=max_model_len,
            cuda_graphs=self.records_graphs,
        )


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
