"""What may wait is bounded, in sequences and tokens, of all and of each tenant; and what the refused are told."""

import math

import pytest

from scheduler_svc.backlog import Backlog, BacklogLimits, Place
from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.core.sequence import Sampling, Sequence
from scheduler_svc.core.tenants import TenantLimits, Tenants
from scheduler_svc.drain_rate import KNOWN_AFTER_S, MAX_RETRY_S, UNKNOWN_RETRY_S, WINDOW_S, DrainRate
from scheduler_svc.errors import QueueFull
from scheduler_svc.expiries import FEW, Expiries
from scheduler_svc.requests import BeamOptions, GenerationRequest


def request(num_prompt: int = 10, tenant: str = "", **options: object) -> GenerationRequest:
    return GenerationRequest("r", [1] * num_prompt, Sampling(), tenant=tenant, **options)  # type: ignore[arg-type]


class Room:
    """A backlog over one real queue."""

    def __init__(self, max_sequences: int = 100, max_tokens: int = 10_000, **tenants: TenantLimits) -> None:
        self.rate = DrainRate()
        known, accounts = Tenants(tenants), Accounts()
        self.queue = AdmissionQueue(accounts)
        limits = BacklogLimits(max_sequences, max_tokens)
        self.backlog = Backlog(limits, known, accounts, self.rate, lambda: len(self.queue))

    def queued(self, asked: GenerationRequest) -> tuple[Place, Sequence]:
        place = self.backlog.enter(asked)
        sequence = Sequence(asked.request_id, asked.prompt_ids, tenant=asked.tenant)
        self.queue.enter(sequence)
        self.backlog.note_opened(place)
        return place, sequence


@pytest.mark.parametrize("ends", ["queued", "opening"])
def test_sequences_that_wait_are_bounded_whether_or_not_they_are_in_a_queue_yet(ends: str) -> None:
    room = Room(max_sequences=3)
    for _ in range(3):
        last = room.queued(request())[0] if ends == "queued" else room.backlog.enter(request())
    with pytest.raises(QueueFull, match="3 sequences wait"):
        room.backlog.enter(request())
    if ends == "queued":
        room.queue.remove(next(iter(room.queue)))  # admitted: its request goes on, and another may wait
    else:
        room.backlog.note_opened(last)  # and was refused
    room.backlog.enter(request())


@pytest.mark.parametrize(
    "options",
    [{"num_samples": 5}, {"best_of": 5}, {"beam": BeamOptions(5, 1.0, EarlyStopping.NO)}],
    ids=["n", "best_of", "beam"],
)
def test_each_sample_counts(options: dict[str, object]) -> None:
    room = Room(max_sequences=5)
    room.backlog.enter(request(**options))
    with pytest.raises(QueueFull, match="5 sequences"):
        room.backlog.enter(request())


def test_tokens_that_wait_are_bounded_but_where_nothing_waits_one_request_is_taken_whatever_it_has() -> None:
    room = Room(max_tokens=100)
    place, sequence = room.queued(request(500))
    with pytest.raises(QueueFull, match="500 tokens wait, and max_waiting_tokens is 100"):
        room.backlog.enter(request(1))
    room.queue.remove(sequence)
    room.backlog.enter(request(60))
    room.backlog.enter(request(40))
    with pytest.raises(QueueFull):
        room.backlog.enter(request(1))
    room.backlog.leave(place.tenant)


def test_a_tenant_has_its_own_limits_and_others_do_not_notice() -> None:
    room = Room(small=TenantLimits(max_requests=2, max_queued_tokens=50))
    for _ in range(2):
        room.queued(request(20, "small"))
    with pytest.raises(QueueFull, match="2 requests at once"):
        room.backlog.enter(request(1, "small"))
    room.backlog.enter(request(20, "other"))
    room.backlog.leave("small")  # though its tokens still wait here
    with pytest.raises(QueueFull, match="40 tokens of the tenant wait, and it may have 50"):
        room.backlog.enter(request(11, "small"))
    room.backlog.enter(request(10, "small"))


def test_names_of_tenants_are_not_kept() -> None:
    room = Room()
    for number in range(50):
        place, sequence = room.queued(request(3, f"tenant {number}"))
        room.queue.remove(sequence)
        room.backlog.leave(place.tenant)
    assert not room.backlog._live
    assert not room.backlog._opening_tokens
    assert room.backlog._num_opening == 0


def test_who_is_refused_is_told_the_time_in_which_the_queue_will_be_empty() -> None:
    room = Room(max_sequences=4)
    for _ in range(4):
        room.queued(request())

    def told() -> float:
        with pytest.raises(QueueFull) as caught:
            room.backlog.check("")
        return caught.value.retry_after_s

    assert told() == UNKNOWN_RETRY_S
    room.rate.note(100.0, 0)
    room.rate.note(110.0, 20)  # two a second
    assert told() == pytest.approx(2.0)
    room.rate.note(100.0 + WINDOW_S, 20)
    room.rate.note(120.0 + WINDOW_S, 20)  # nothing for ever
    assert told() == MAX_RETRY_S


@pytest.mark.parametrize(
    ("seconds", "most"),
    [(0.5, 40), (1.0, 60), (9.0, 61), (10.0, 62), (30.0, 3 * 62)],
)
def test_the_most_that_have_gone_in_so_short_a_time_are_those_of_the_best_moment(seconds: float, most: float) -> None:
    rate, gone = DrainRate(), 0
    for tick in range(101):  # ten seconds of it: one, and two bursts, 0.8 s apart
        gone += {5: 1, 50: 40, 58: 20}.get(tick, 0)
        rate.note(1000 + tick / 10, gone)
    assert rate.most_within(seconds) == pytest.approx(most)


def test_nothing_is_impossible_before_something_has_been_seen() -> None:
    rate = DrainRate()
    assert rate.most_within(1.0) == math.inf
    rate.note(0.0, 0)
    rate.note(KNOWN_AFTER_S / 2, 0)
    assert rate.most_within(0.001) == math.inf
    rate.note(KNOWN_AFTER_S, 0)
    assert rate.most_within(0.001) == 0
    assert rate.most_within(100 * KNOWN_AFTER_S) == 100, "nothing for five seconds is not nothing for ever"


def test_what_goes_from_a_queue_that_holds_nobody_up_says_nothing_of_how_much_could() -> None:
    rate = DrainRate()
    for second in range(int(2 * WINDOW_S)):
        rate.note(second, second, held_up=second % 4 > 0)
        assert rate.most_within(1.0) == math.inf
    rested = 2 * WINDOW_S
    rate.note(rested, 1000, held_up=False)
    rate.note(rested + KNOWN_AFTER_S / 2, 1000)
    assert rate.most_within(0.5) == math.inf, "too little"
    rate.note(rested + KNOWN_AFTER_S, 1000)
    assert rate.most_within(0.5) == 0, "all of them went before somebody had to wait"
    rate.note(rested + KNOWN_AFTER_S + 1, 1003)
    assert rate.most_within(0.5) == 3
    assert rate.retry_after_s(1000) == pytest.approx(WINDOW_S, rel=0.1), "the mean is of all"


def test_what_is_over_is_told_once_and_what_has_ended_takes_no_room() -> None:
    expiries = Expiries()
    for number in range(10 * FEW):
        expiries.add(f"r{number}", 1000.0 + number)
        if number % 10:
            expiries.remove(f"r{number}")
    assert len(expiries._heap) <= 3 * FEW + FEW
    assert expiries.next_at == 1000.0
    assert list(expiries.due(999.0)) == []
    assert list(expiries.due(1020.0)) == ["r0", "r10", "r20"]
    assert expiries.next_at == 1030.0
    assert list(expiries.due(math.inf)) == [f"r{number}" for number in range(30, 10 * FEW, 10)]
    assert expiries.next_at == math.inf


def test_nothing_is_kept_of_requests_when_none_is_left() -> None:
    expiries = Expiries()
    for number in range(3):
        expiries.add(f"r{number}", 1000.0 + number)
    for number in range(3):
        expiries.remove(f"r{number}")
    assert (expiries._heap, expiries.next_at) == ([], math.inf)


def test_an_id_that_is_used_again_has_its_new_time() -> None:
    expiries = Expiries()
    expiries.add("r", 10.0)
    expiries.remove("r")
    expiries.add("r", 15.0)
    assert list(expiries.due(10.0)) == []
    assert list(expiries.due(15.0)) == ["r"]
