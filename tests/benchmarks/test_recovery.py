"""The figures of a recovery are of one loss and one freeze."""

import pytest

from benchmarks.recovery import measure


@pytest.mark.slow
async def test_each_round_measures_a_loss_and_a_freeze() -> None:
    found = await measure(rounds=1)
    assert found["rounds"] == 1
    assert found["recovery_s"] == found["recovery_max_s"]
    assert found["freeze_overrun_s"] == found["freeze_overrun_max_s"] > 0
