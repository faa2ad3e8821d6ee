"""The small real model through the gateway: its tokenizer and its text are the same by both ways."""

from pathlib import Path
from typing import Any

import pytest

from executor_svc.model.demo_model import demo_model_path
from paged.client import Client
from tests.processes import cleaned_up, start_executor, start_scheduler
from tests.system.gateway import gateway_before
from tests.system.requests import ready

pytestmark = [pytest.mark.slow, pytest.mark.model]
PROMPT = "The colours of the rainbow are"


async def test_a_text_is_the_same_through_the_gateway(tmp_path: Path) -> None:
    with cleaned_up([]) as services:
        flags = ["--model", str(demo_model_path()), "--served-name", "small", "--dtype", "float32"]
        services.append(start_executor(tmp_path, *flags, "--num-blocks", "256"))
        services.append(start_scheduler(tmp_path, services[0].wait_until_ready(240).address))
        address = services[1].wait_until_ready().address
        async with Client(address) as own:
            await ready(own, 60)
            begin_token, *prompt_ids = await own.tokenize(PROMPT)
            assert begin_token == (await own.model()).bos_token_id
            expected = await own.complete(prompt_ids, max_tokens=40, temperature=0)
            with gateway_before(tmp_path / "gateway.log", "small", [address]) as gateway:
                async with gateway.client() as client:
                    asked: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
                    whole = await client.completions.create(**asked)
                    stream = await client.completions.create(**asked, stream=True)
                    pieces = [piece.choices[0].text async for piece in stream if piece.choices]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt_ids)
    assert whole.choices[0].text == expected.text
    assert "".join(pieces) == expected.text
