"""Models spread over two processes (gloo): each family by the margin rule, and what one cannot do with several."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from structlog.testing import capture_logs
from torch import nn

from executor_svc.model import memory
from executor_svc.model.device import rank_device
from executor_svc.model.parallel.sharding import check_shardable, warn_of_idle_cores
from executor_svc.model.parallel.shares import SummedLinear
from executor_svc.model.refusal import ModelRefused
from executor_svc.ranks import Ranks
from kernels.cpu.levels import supported
from kernels.cpu.linear import is_native
from tests.model.families import SERVED, tiny_config
from tests.model.test_device import WORKING, machine
from tests.tiny_models import TINY_DECODER, save_model, save_tiny

# Two of them are spread in a way of their own: phi3 has q, k and v in one weight, gpt_oss all heads on every rank.
FAMILIES = ["llama", "qwen3", "mistral", "gemma3_text", "qwen3_moe", "phi3", "gpt_oss", "deepseek_v3"]
ROUNDED = ["llama", "qwen3", "mistral", "gemma3_text"]
WIDE = {"hidden_size": 320, "intermediate_size": 1280, "initializer_range": 0.05}  # enough for weights in 8 bits
LEVELS = (*supported(), "reference")
OTHERS = LEVELS[1:]
TWO = Ranks(1, 2, 1, 2)


def run_two(commands: Sequence[Sequence[str]], **settings: str) -> list[tuple[int, str]]:
    """Exit code and output of each rank; `settings` are an executor's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared |= {f"PAGED_EXECUTOR_{name.upper()}": value for name, value in settings.items()}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def serve_in_two_processes(models: Iterable[tuple[str, Path]], **settings: str) -> None:
    """`models` are types and directories."""
    command = ["-m", "tests.model.parallel_rank", *(f"{dtype}:{directory}" for dtype, directory in models)]
    for code, said in run_two([command, command], **settings):
        assert code == 0, said[-4000:]


def two_headed(family: str) -> transformers.PreTrainedConfig:
    config = tiny_config(family, SERVED[family])
    text = config.get_text_config()
    if getattr(text, "num_key_value_heads", 2) == 1:
        text.num_key_value_heads = 2
    return config


def shardable(config: transformers.PreTrainedConfig) -> bool:
    try:
        check_shardable(Path("model"), config, 2)
    except ModelRefused:
        return False
    return True


@pytest.mark.parametrize("cpu_kernels", ["auto", *(pytest.param(level, marks=pytest.mark.slow) for level in OTHERS)])
def test_families_are_served_as_by_one_process(cpu_kernels: str, tmp_path: Path) -> None:
    """In fp32 by the margin rule; in bf16 their rounding is that of transformers."""
    models = {family: save_model(tmp_path / family, two_headed(family)) for family in FAMILIES}
    serve_in_two_processes(
        [("float32", model) for model in models.values()] + [("bfloat16", models[family]) for family in ROUNDED],
        cpu_kernels=cpu_kernels,
    )


@pytest.mark.skipif(not is_native(LEVELS[0], torch.bfloat16), reason="no native kernels for this CPU")
def test_a_model_in_8_bits_is_served_as_by_one_process(tmp_path: Path) -> None:
    config = tiny_config("llama", SERVED["llama"] | WIDE)
    serve_in_two_processes([("int8", save_model(tmp_path / "wide", config))])


def test_ranks_add_up_in_fp32_on_a_cpu_for_not_all_of_them_need_have_native_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those give fp32. What is too far off for one on this rank need not be so on another."""
    summed = []
    monkeypatch.setattr(dist, "all_reduce", lambda made, **_: summed.append(made.dtype))
    own = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    assert SummedLinear(own, None, group=None)(torch.ones(3, 64).bfloat16()).dtype == torch.bfloat16
    assert summed == [torch.float32]


def test_a_rank_that_cannot_go_on_alone_ends_the_others_with_a_reason(tmp_path: Path) -> None:
    """Rank 1 is asked for more blocks than there is memory for, and rank 0 for a few."""
    model = save_tiny(tmp_path, "llama")
    command = ["-m", "executor_svc", "--model", str(model), "--endpoint", f"ipc://{tmp_path}/plans", "--num-blocks"]
    (code, said), (other_code, other_said) = run_two([[*command, "40"], [*command, str(1 << 24)]])
    assert (code, other_code) == (1, 1)
    assert "set num_blocks or kv_memory to fit" in other_said
    assert "another one is gone; its log says why" in said
    assert "Traceback" not in said + other_said


@pytest.mark.slow
@pytest.mark.skipif(LEVELS[0] == "reference", reason="nothing is compiled for this CPU")
def test_a_rank_waits_for_one_that_still_compiles_kernels(tmp_path: Path) -> None:
    """However short the time is that they may leave each other waiting within a step."""
    model = save_tiny(tmp_path, "llama")
    command = ["-m", "executor_svc", "--model", str(model), "--endpoint", f"ipc://{tmp_path}/plans"]
    command += ["--num-blocks", "40", "--rank-timeout-s", "2"]
    nowhere = str(tmp_path / "nowhere" / "endpoint")  # where rank 0 cannot say that it is ready, and so ends
    ends, compiles = [*command, "--endpoint-file", nowhere], [*command, "--cache-dir", str(tmp_path / "empty")]
    (code, said), (other_code, other_said) = run_two([ends, compiles])
    assert (code, other_code) == (1, 0), said + other_said
    assert "endpoint_file_not_written" in said


@pytest.mark.slow
def test_every_family_that_transformers_can_spread_is_served_as_by_one_process(tmp_path: Path) -> None:
    configs = {family: two_headed(family) for family in SERVED}
    # gemma4, the one with pictures, takes a row out of its embedding by hand, which shares have none of; it is refused.
    spread = [family for family, config in configs.items() if family != "gemma4" and shardable(config)]
    assert len(spread) > 50
    serve_in_two_processes([("float32", save_model(tmp_path / family, configs[family])) for family in spread])


@pytest.mark.parametrize(
    ("config", "num_ranks", "said"),
    [
        (transformers.GPT2Config(), 2, "no plan for spreading a gpt2 over 2 processes"),
        (transformers.Gemma3TextConfig(num_key_value_heads=1), 2, "num_key_value_heads is 1, which 2 processes"),
        (transformers.Qwen3Config(num_attention_heads=6), 4, "num_attention_heads is 6, which 4 processes"),
        (transformers.Gemma3Config(text_config={"num_key_value_heads": 1}), 2, "_heads is 1"),
    ],
    ids=["no plan", "one KV head", "heads", "text part"],
)
def test_a_model_that_processes_cannot_share_is_refused(
    config: transformers.PreTrainedConfig, num_ranks: int, said: str
) -> None:
    with pytest.raises(ModelRefused, match=said) as refused:
        check_shardable(Path("model"), config, num_ranks)
    assert "torchrun" in str(refused.value)


def test_a_quantised_model_is_refused() -> None:
    config = transformers.LlamaConfig(**TINY_DECODER, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelRefused, match="quantised weights are not spread"):
        check_shardable(Path("model"), config, 2)


def test_each_process_has_a_gpu_of_its_own() -> None:
    assert str(rank_device("cuda", TWO, machine(num_gpus=2))) == "cuda:1"
    with pytest.raises(ModelRefused, match=r"2 processes .* need a GPU each, and there are 1.*--nproc-per-node 1"):
        rank_device("auto", TWO, machine(num_gpus=1))
    with pytest.raises(ModelRefused, match="CUDA_VISIBLE_DEVICES"):
        rank_device("cpu", TWO, WORKING)


def test_processes_of_one_cpu_share_what_one_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    asked = {"num_blocks": None, "kv_bytes": None, "most_blocks": 999}
    assert memory.choose_num_blocks(10, 200, torch.device("cpu"), **asked) == 40
    assert memory.choose_num_blocks(10, 200, torch.device("cpu"), **asked, num_sharing=2) == 15
    with pytest.raises(ModelRefused, match="500 bytes are available"):
        memory.choose_num_blocks(10, 200, torch.device("cpu"), **asked | {"num_blocks": 40}, num_sharing=2)


@pytest.mark.parametrize(("num_threads", "said"), [(1, "--cpu-threads 8"), (8, None)])
def test_cores_that_torchrun_leaves_idle_are_named(num_threads: int, said: str | None) -> None:
    with capture_logs() as logs:
        warn_of_idle_cores(2, num_threads, 16)
    assert [entry["set"] for entry in logs] == ([said] if said else [])
