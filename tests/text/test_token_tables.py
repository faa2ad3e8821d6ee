"""What tokens stand for is looked up when a tokenizer is loaded: nothing that stays is made as they are met."""

import functools
import tracemalloc

import pytest

from scheduler_svc.text.detokenizer import Detokenizer
from scheduler_svc.text.tokenizer import Tokenizer
from tests.text.models import KINDS, bundle_of


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tokens_that_are_met_for_the_first_time_leave_nothing(kind: str, skip: bool) -> None:
    tokenizer = Tokenizer.from_bundle(bundle_of(KINDS[kind]))
    num_ids = tokenizer.vocab_size + 2
    text = functools.partial(Detokenizer, tokenizer, [], skip)
    text().push([num_ids - 1])  # what is made once, whichever token it is
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for token_id in range(num_ids):
            text().push([token_id])
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert left < 5 * num_ids  # an object for each would take fifty and more
