"""Who is suspected of taking executors down, and who is convicted."""

from scheduler_svc.answer import Answer
from scheduler_svc.core.sequence import Sampling, Sequence
from scheduler_svc.delivery import Delivery
from scheduler_svc.opening import open_request
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.suspects import LOSSES_TOGETHER, UNTOLD_FOR_ONE, Suspects
from tests.text.test_detokenizer import tokenizer_of

MAX_LOSSES = 2


def sequence_of(name: str) -> Sequence:
    request = GenerationRequest(name, [1, 2, 3], Sampling(), 10)
    delivery = Delivery(
        max_unread_bytes=1 << 20, max_total_unread_bytes=1 << 20, take=Answer.take, fail=lambda name, error: None
    )
    return open_request(request, tokenizer_of("byte_level"), (), None, delivery).first


def suspected(suspects: Suspects, *sequences: Sequence) -> None:
    """They ran at as many losses as it takes."""
    for _ in range(LOSSES_TOGETHER):
        assert not any(sequence.alone for sequence in sequences)
        assert not suspects.note_loss(list(sequences), alone=False)
    assert all(sequence.alone for sequence in sequences)


def test_what_was_computed_alone_at_losses_that_were_announced_is_convicted_and_nobody_else() -> None:
    suspects, poison, other = Suspects(MAX_LOSSES), sequence_of("poison"), sequence_of("other")
    suspected(suspects, poison, other)
    suspects.note_tokens([other])
    assert not other.alone
    for _ in range(MAX_LOSSES - 1):
        assert not suspects.note_loss([other, poison], alone=True)
    assert suspects.note_loss([other, poison], alone=True) == [poison.owner]
    assert not other.alone


def test_losses_that_nobody_has_announced_may_be_anothers_and_convict_only_when_there_are_many() -> None:
    suspects, poison = Suspects(MAX_LOSSES), sequence_of("poison")
    suspected(suspects, poison)
    for _ in range(MAX_LOSSES * UNTOLD_FOR_ONE - 1):
        assert not suspects.note_loss([poison], alone=False)
    assert suspects.note_loss([poison], alone=False) == [poison.owner]


def test_a_token_clears_of_all_losses() -> None:
    suspects, innocent = Suspects(MAX_LOSSES), sequence_of("innocent")
    for _ in range(2):
        suspected(suspects, innocent)
        for _ in range(MAX_LOSSES * UNTOLD_FOR_ONE - 1):
            assert not suspects.note_loss([innocent], alone=False)
        suspects.note_tokens([innocent])
