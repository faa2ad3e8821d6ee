"""What is read through a table is what was written last, whatever was read, copied and overwritten in between."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from executor_svc.simulated.memory import SlotMemory, UnwrittenSlot
from executor_svc.simulated.text import R

UNWRITTEN = -1
NUM_BLOCKS = 6
B = 4


def naive_context(ids: list[int]) -> int:
    return sum((token + 1) * R**position for position, token in enumerate(ids)) % 2**64


def read(memory: SlotMemory, table: list[int], length: int) -> int:
    return int(memory.contexts(np.array([table], np.int32), np.array([length], np.int32))[0])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_contexts_are_those_of_a_plain_list_of_slots(data: st.DataObject) -> None:
    memory, slots = SlotMemory(NUM_BLOCKS, B), [UNWRITTEN] * (NUM_BLOCKS * B)
    blocks = st.integers(0, NUM_BLOCKS - 1)
    for _ in range(data.draw(st.integers(1, 12), "operations")):
        match data.draw(st.sampled_from(["write", "write a block", "copy", "read"]), "operation"):
            case "write":
                at = data.draw(st.lists(st.integers(0, len(slots) - 1), unique=True, max_size=8), "slots")
                ids = data.draw(st.lists(st.integers(0, 2**20), min_size=len(at), max_size=len(at)), "ids")
                memory.write(np.array(at, np.int64), np.array(ids, np.int32))
                for slot in at:
                    if slot % B == 0 and slots[slot] != UNWRITTEN:
                        slots[slot : slot + B] = [UNWRITTEN] * B  # a block that begins anew
                for slot, token in zip(at, ids, strict=True):
                    slots[slot] = token
            case "write a block":
                begin = data.draw(blocks, "block") * B
                ids = data.draw(st.lists(st.integers(0, 2**20), min_size=B, max_size=B), "ids")
                memory.write(np.arange(begin, begin + B), np.array(ids, np.int32))
                slots[begin : begin + B] = ids
            case "copy":
                pairs = data.draw(st.lists(blocks, unique=True, min_size=2, max_size=4), "copy")
                half = len(pairs) // 2
                sources, destinations = pairs[:half], pairs[half : 2 * half]
                memory.copy(np.array(sources, np.int32), np.array(destinations, np.int32))
                for source, destination in zip(sources, destinations, strict=True):
                    slots[destination * B : destination * B + B] = slots[source * B : source * B + B]
            case "read":
                table = data.draw(st.lists(blocks, min_size=1, max_size=4), "table")
                length = data.draw(st.integers(1, len(table) * B), "length")
                seen = [slots[table[p // B] * B + p % B] for p in range(length)]
                if UNWRITTEN in seen:
                    with pytest.raises(UnwrittenSlot):
                        read(memory, table, length)
                else:
                    assert read(memory, table, length) == naive_context(seen)


def test_rows_of_different_lengths_are_read_at_once() -> None:
    memory = SlotMemory(NUM_BLOCKS, B)
    memory.write(np.arange(5 * B), np.arange(5 * B, dtype=np.int32))
    tables = np.array([[0, 1, 2], [4, 0, 0], [3, 5, 5]], np.int32)  # block 5 is never written, and never needed
    contexts = memory.contexts(tables, np.array([12, 1, 4], np.int32)).tolist()
    assert contexts == [naive_context(list(range(12))), naive_context([16]), naive_context([12, 13, 14, 15])]
    with pytest.raises(UnwrittenSlot, match="slot 20 of position 4") as caught:
        memory.contexts(tables, np.array([12, 1, 5], np.int32))
    assert caught.value.row == 2


def test_a_copy_into_a_block_that_was_read_before_is_seen() -> None:
    memory = SlotMemory(NUM_BLOCKS, B)
    memory.write(np.arange(2 * B), np.arange(2 * B, dtype=np.int32))
    assert read(memory, [1], B) == naive_context([4, 5, 6, 7])
    memory.copy(np.array([0], np.int32), np.array([1], np.int32))
    assert read(memory, [1], B) == naive_context([0, 1, 2, 3])


def test_a_cleared_memory_holds_nothing() -> None:
    memory = SlotMemory(NUM_BLOCKS, B)
    memory.write(np.arange(B), np.arange(B, dtype=np.int32))
    read(memory, [0], B)
    memory.clear()
    with pytest.raises(UnwrittenSlot):
        read(memory, [0], B)


def test_whole_blocks_of_a_context_are_not_read_slot_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def slot_by_slot(memory: SlotMemory, row: int, table: np.ndarray, length: int) -> np.uint64:
        raise AssertionError(f"{length} slots were read one by one")

    block_size = 16
    memory, ids = SlotMemory(NUM_BLOCKS, block_size), np.arange(1, 3 * block_size, dtype=np.int32)
    memory.write(np.arange(block_size, block_size + len(ids)), ids)
    monkeypatch.setattr(SlotMemory, "_context", slot_by_slot)
    assert read(memory, [1, 2, 3, 0], len(ids)) == naive_context(ids.tolist())
    assert read(memory, [1, 2, 3], 2 * block_size) == naive_context(ids[: 2 * block_size].tolist())
