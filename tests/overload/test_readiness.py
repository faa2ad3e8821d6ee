"""A scheduler is ready while steps complete, not merely while an executor is there."""

import asyncio
import json
from pathlib import Path

from scheduler_svc.core.sequence import Sampling
from scheduler_svc.requests import GenerationRequest
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, samples_ids


async def test_an_executor_whose_step_does_not_end_makes_it_unready_before_it_counts_as_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"faults": [{"step": 3, "kind": "hang"}]}))
    with cleaned_up([start_executor(tmp_path, "--simulate", "--simulate-script", str(script))]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path, result_timeout_s=4.0) as engine:
            asked = GenerationRequest("r", [300], Sampling(temperature=0.0), max_tokens=20, ignore_eos=True)
            asking = asyncio.create_task(samples_ids(engine, asked))
            async with asyncio.timeout(20):
                while engine.ready:
                    await asyncio.sleep(0.01)
            assert engine.load().executor_attached
            assert engine.load().executor_losses == 0
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
