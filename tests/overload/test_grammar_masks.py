"""Masks that take long leave the event loop to others between any two."""

import asyncio

import pytest

from scheduler_svc import grammar_masks
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.grammar_masks import GrammarMasks
from scheduler_svc.settings import SchedulerSettings


def awaiting_mask(name: str) -> Sequence:
    sequence = Sequence(name, [1, 2, 3], 4)
    sequence.masked, sequence.state = True, State.RUNNING
    assert sequence.needs_mask
    return sequence


async def test_a_turn_has_one_slice_for_masks_however_many_results_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_masks, "SLICE_S", -1.0)  # one mask takes all of it
    late: list[Sequence] = []
    given: list[Sequence] = []
    masks = GrammarMasks(SchedulerSettings(), fail=lambda sequence, error: None, on_late=late.append)
    monkeypatch.setattr(masks, "_has_any", True)
    monkeypatch.setattr(masks, "_give_one", given.append)
    sequences = [awaiting_mask(str(i)) for i in range(20)]
    for i in range(0, len(sequences), 2):  # a result
        masks.on_tokens(sequences[i : i + 2])
    assert given == sequences[:1]
    for turn in range(2, len(sequences) + 1):
        await asyncio.sleep(0)
        assert given == sequences[:turn]
    assert late == sequences[1:]
    masks.close()
