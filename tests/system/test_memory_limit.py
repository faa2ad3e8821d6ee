"""C10.5: an executor that may have a gigabyte takes KV memory that fits into it, or says at once what does not."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from paged.client import Client
from tests.processes import START_TIMEOUT_S, Service, cleaned_up, start_executor, start_scheduler
from tests.system.control_group import MemoryGroup, memory_group
from tests.system.requests import idle_load, ready
from tests.tiny_models import TINY_DECODER, save_model

GROUP_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20  # 16 slots, two layers, keys and values, 32 heads of 128 numbers
MOST_TOKENS = 1 << 15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, but for its keys and values."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    config = transformers.LlamaConfig(**TINY_DECODER | heads | {"max_position_embeddings": MOST_TOKENS})
    return save_model(tmp_path_factory.mktemp("model"), config)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(GROUP_BYTES) as made:
        yield made


def start(directory: Path, model: Path, group: MemoryGroup, *flags: str) -> Service:
    """Of its own, for what it shares with others counts for another group."""
    wanted = ["--model", str(model), "--dtype", "float32", "--max-rows", "8"]
    return group.take(start_executor(directory, *wanted, *flags, of_its_own=True))


async def test_c10_5_a_pool_that_fits_is_filled_to_its_last_block_and_nothing_is_killed(
    tmp_path: Path, model: Path, group: MemoryGroup
) -> None:
    chance = random.Random(1)
    with cleaned_up([]) as services:
        services.append(start(tmp_path, model, group, "--kv-memory", "100000000"))
        executor = services[0].wait_until_ready()
        services.append(start_scheduler(tmp_path, executor.address))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            num_blocks = (await client.load()).total_blocks
            assert num_blocks == 100_000_000 // BLOCK_BYTES - 1
            assert (await client.model()).max_model_len == num_blocks * 16
            assert "max_model_len_lowered" in executor.log
            prompts = [[chance.randrange(256) for _ in range(16 * 13)] for _ in range(num_blocks // 12)]
            ends = await asyncio.gather(*(client.complete(p, max_tokens=8, ignore_eos=True) for p in prompts))
            assert [len(end.token_ids) for end in ends] == [8] * len(prompts)
            load = await idle_load(client)
        assert load.cached_blocks > 0.9 * num_blocks, "nearly all blocks have been written"
        assert executor.process.poll() is None
        assert group.num_killed == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-memory", "2000000000"),
        pytest.param(("--kv-memory", "900000000"), marks=pytest.mark.slow),
        pytest.param(("--num-blocks", "2000"), marks=pytest.mark.slow),
    ],
)
def test_c10_5_a_pool_that_does_not_fit_is_refused_with_both_sizes(
    tmp_path: Path, model: Path, group: MemoryGroup, flags: tuple[str, str]
) -> None:
    with cleaned_up([start(tmp_path, model, group, *flags)]) as (executor,):
        assert executor.process.wait(START_TIMEOUT_S) == 1
        required = int(executor.log.split(" bytes are required")[0].split()[-1])
        available = int(executor.log.split(" bytes are available")[0].split()[-1])
        assert available < GROUP_BYTES < 3 * required
        assert required > available - GROUP_BYTES // 2
        assert group.num_killed == 0


@pytest.mark.slow
def test_c10_5_where_nothing_is_said_it_takes_a_part_of_what_the_group_has_left(
    tmp_path: Path, model: Path, group: MemoryGroup
) -> None:
    with cleaned_up([start(tmp_path, model, group)]) as (executor,):
        executor.wait_until_ready()
        available, taken = (
            int(executor.log.split(f" {name}=")[1].split()[0]) for name in ("available_bytes", "blocks")
        )
        assert 20 * BLOCK_BYTES < taken * BLOCK_BYTES < available < GROUP_BYTES
        assert group.num_killed == 0


@pytest.mark.parametrize("flags", [("--kv-memory", "0"), ("--num-blocks", "1"), ("--num-blocks", "0")])
def test_c10_5_no_block_at_all_is_refused_by_name(tmp_path: Path, model: Path, flags: tuple[str, str]) -> None:
    with cleaned_up([start_executor(tmp_path, "--model", str(model), *flags)]) as (executor,):
        assert executor.process.wait(START_TIMEOUT_S) == 2
        assert flags[0].removeprefix("--").replace("-", "_") in executor.log.replace("-", "_")
