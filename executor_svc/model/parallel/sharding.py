"""Whether a model can be spread over several processes, by the plan that transformers has for it."""

import re
from pathlib import Path

import structlog
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from executor_svc.model.parallel.shares import make_plain
from executor_svc.model.refusal import ModelRefused

log = structlog.get_logger(__name__)

_HEADS = re.compile(r"(\w+_)?num_(\w+_)?(attention|key_value)_heads(_per_layer)?")  # counts in a configuration
_LITTLE = 0.75  # of the weights on every rank: hardly worth several processes


def check_shardable(directory: Path, config: PreTrainedConfig, num_ranks: int) -> None:
    """Before weights are read. Raises ModelRefused."""
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefused(
            f"{directory} is quantised, and quantised weights are not spread over several processes; "
            "start it in one, without torchrun, or take its unquantised weights"
        )
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise ModelRefused(
            f"transformers has no plan for spreading a {config.model_type} over {num_ranks} processes; "
            "start it in one, without torchrun"
        )
    if not any("attn" in name or "attention" in name for name, style in plan.items() if style == "colwise"):
        return  # every rank has all heads
    for name, counts in _head_counts(text).items():
        for num_heads in counts:
            if num_heads % num_ranks:
                raise ModelRefused(
                    f"{directory}: {name} is {num_heads}, which {num_ranks} processes cannot share (a head is neither "
                    "split nor kept twice); start torchrun with an --nproc-per-node that divides it, or start one "
                    "process without torchrun"
                )


def finish(model: PreTrainedModel) -> None:
    """Of a model just loaded: make its linear layers ordinary ones where that can be, and tell how much of it each rank
    holds; warn where that is nearly all."""
    own = sum(_local(parameter).numel() for parameter in model.parameters())
    share = own / max(1, sum(parameter.numel() for parameter in model.parameters()))
    tell = log.warning if share > _LITTLE else log.info
    tell("model_spread", weights_per_rank=round(share, 3), plain_layers=make_plain(model))


def warn_of_idle_cores(num_processes: int, num_threads: int, num_cores: int) -> None:
    """torchrun gives each process a single thread unless it is told otherwise."""
    if num_processes * num_threads <= num_cores // 2:
        setting = f"--cpu-threads {num_cores // num_processes}"
        log.warning("cores_unused", cores=num_cores, processes=num_processes, threads_each=num_threads, set=setting)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _head_counts(text: PreTrainedConfig) -> dict[str, list[int]]:
    """All counts of heads that the configuration names, some of them once a layer."""
    names = {name for name in text.to_dict() if _HEADS.fullmatch(name)} | {"num_attention_heads"}
    counts = {name: getattr(text, name, None) for name in sorted(names)}
    lists = {name: count if isinstance(count, list | tuple) else [count] for name, count in counts.items()}
    return {name: [count for count in counts if isinstance(count, int)] for name, counts in lists.items()}
