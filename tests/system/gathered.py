"""Answers that leave together, in the test's own hands: whatever comes for them, and whoever takes it."""

from scheduler_svc.answer import Answer
from scheduler_svc.delivery import Delivery
from scheduler_svc.gathering import Gathering
from scheduler_svc.opening import open_request
from scheduler_svc.requests import Delta, PlainDelta
from scheduler_svc.samples import Samples
from tests.system.test_delivery import request
from tests.text.test_detokenizer import tokenizer_of

NUM_TOKENS = 40
FOREVER_S = 1e9


def new_delivery() -> Delivery:
    return Delivery(
        max_unread_bytes=1 << 20, max_total_unread_bytes=1 << 20, take=Answer.take, fail=lambda name, error: None
    )


def opened(delivery: Delivery, gathering: Gathering | None, count: int, kind: str = "byte_level") -> list[Samples]:
    tokenizer = tokenizer_of(kind)
    return [
        open_request(request(f"r{number}", NUM_TOKENS), tokenizer, (), None, delivery, gathering)
        for number in range(count)
    ]


def give(delivery: Delivery, streams: list[Samples], *token_ids: int) -> None:
    for samples in streams:
        samples.first.token_ids.extend(token_ids)
    delivery.note(samples.first for samples in streams)


def take(gathering: Gathering) -> list[Delta | PlainDelta]:
    """All there is, as a message that has left."""
    deltas = []
    while gathering.has_more:
        deltas += [delta for _, delta in gathering.take()]
        gathering.note_sending()
        gathering.note_sent()
    return deltas
