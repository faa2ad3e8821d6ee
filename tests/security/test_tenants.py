"""What the token file says of a tenant holds for its requests, and for nobody else's."""

import asyncio
from pathlib import Path

import pytest

from paged.client import Client, ResourceExhaustedError, Retries
from scheduler_svc.api.tokens import BadTokenFile, read_tokens
from tests.security.keys import Keys
from tests.system.conftest import System
from tests.system.requests import ready


async def test_a_tenant_has_as_many_requests_at_once_as_it_may(system: System, keys: Keys) -> None:
    shop, bank = keys.token("shop", "--tenant", "shop"), keys.token("bank", "--tenant", "bank")
    with keys.token_file.open("a") as file:
        file.write('\n[[tenants]]\nname = "shop"\nmax_requests = 1\n')
    system.executor_flags = ["--simulate-fixed-us", "2000"]
    system.scheduler_flags = keys.scheduler_flags
    system.start()
    show = {"credentials": keys.credentials, "retries": Retries(1)}
    async with (
        Client(system.address, token=keys.operator, **show) as operator,
        Client(system.address, token=shop, **show) as of_shop,
        Client(system.address, token=bank, **show) as of_bank,
    ):
        await ready(operator)
        running = asyncio.create_task(of_shop.complete([300] * 9, max_tokens=400, temperature=0))
        while not (await operator.load()).running_sequences:
            await asyncio.sleep(0.01)
        with pytest.raises(ResourceExhaustedError, match="the tenant has 1 requests at once") as caught:
            await of_shop.complete([300] * 9, max_tokens=4)
        assert caught.value.retry_after_s
        for client in (of_bank, operator):
            assert (await client.complete([300] * 9, max_tokens=4)).usage.prompt_tokens == 9
        await running
        assert (await of_shop.complete([300] * 9, max_tokens=4)).usage.prompt_tokens == 9


def test_a_table_of_its_own_name_is_told_as_what_it_should_be(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text("[tenants.shop]\nweight = 2\n")
    with pytest.raises(BadTokenFile, match=r"tenants: must be tables that begin with \[\[tenants\]\] each"):
        read_tokens(file)
