"""A suspect is computed in steps of its own, which take turns with those of all others: neither waits for long."""

from executor_svc.settings import ExecutorSettings
from scheduler_svc.core.sequence import Sequence
from tests.system.network import Clock
from tests.system.nodes import ExecutorNode, Link

NUM_OTHERS, NUM_STEPS = 5, 40
SETTINGS = ExecutorSettings(simulate=True, block_size=4, num_blocks=600, max_rows=24, tokens_per_step=120)


def gone_round(executor: ExecutorNode, links: list[Link]) -> None:
    for link in links:
        link.act()
        if link.connection is not None:
            executor.router.deliver(link.connection)
    executor.turn()


def num_tokens(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_prompt


def test_exclusive_plans_and_those_of_all_others_take_turns_however_many_sessions_there_are() -> None:
    clock = Clock()
    executor = ExecutorNode(SETTINGS, clock)
    links = [Link(f"scheduler {number}", executor, clock) for number in range(1 + NUM_OTHERS)]
    sequences = [Sequence(f"r{number}", [300 + number], 200) for number in range(len(links))]
    sequences[0].alone = True
    for link, sequence in zip(links, sequences, strict=True):
        link.submit(sequence)
    while not all(num_tokens(sequence) for sequence in sequences):
        gone_round(executor, links)
    before = [num_tokens(sequence) for sequence in sequences]
    for _ in range(NUM_STEPS):
        gone_round(executor, links)
    suspect, *others = [num_tokens(sequence) - n for sequence, n in zip(sequences, before, strict=True)]
    assert suspect == NUM_STEPS // 2
    assert others == [NUM_STEPS // 2] * NUM_OTHERS


def test_of_several_that_are_to_be_computed_alone_each_has_its_turn() -> None:
    clock = Clock()
    executor = ExecutorNode(SETTINGS, clock)
    links = [Link(f"scheduler {number}", executor, clock) for number in range(4)]
    sequences = [Sequence(f"r{number}", [300 + number], 200) for number in range(len(links))]
    for link, sequence in zip(links, sequences, strict=True):
        sequence.alone = True
        link.submit(sequence)
    while not all(num_tokens(sequence) for sequence in sequences):
        gone_round(executor, links)
    before = [num_tokens(sequence) for sequence in sequences]
    for _ in range(NUM_STEPS):
        gone_round(executor, links)
    gained = [num_tokens(sequence) - n for sequence, n in zip(sequences, before, strict=True)]
    assert gained == [NUM_STEPS // len(links)] * len(links)
