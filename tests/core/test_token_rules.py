"""What rules about tokens leave of a mask."""

import random

import numpy as np
import pytest

from scheduler_svc.core.token_rules import TokenRules

VOCAB_SIZE = 96


def mask_of(ids: list[int]) -> bytes:
    bits = np.zeros(VOCAB_SIZE, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize(
    ("rules", "allowed_by_mask", "held_back", "some"),
    [
        (TokenRules(), [95], [], True),
        (TokenRules(), [95], [95], False),
        (TokenRules(allowed_ids=(1, 2)), [2, 3], [], True),
        (TokenRules(allowed_ids=(1, 2)), [3], [], False),
        (TokenRules(allowed_ids=(1, 2)), [2, 3], [2], False),
        (TokenRules(banned=((3,),)), [3], [], False),
        (TokenRules(banned=((5, 6, 3),)), [3], [], False),  # after 5, 6
        (TokenRules(banned=((6, 5, 3),)), [3], [], True),
        (TokenRules(banned=((4, 5, 6, 3),)), [3], [], True),  # longer than all there is
        (TokenRules(banned=((6, 3), (2,), (1,))), [3, 2], [], False),
        (TokenRules(logit_bias=((3, -1e4),)), [3], [], True),
    ],
)
def test_rules_leave_some_of_what_a_mask_allows_or_none(rules, allowed_by_mask, held_back, some):
    assert rules.leave_any_of(mask_of(allowed_by_mask), [5, 6], held_back) is some


def test_it_is_as_trying_each_token():
    chance, ids = random.Random(0), range(8)
    for _ in range(500):
        after = chance.choices(ids, k=chance.randrange(4))
        banned = tuple(tuple(chance.choices(ids, k=chance.randrange(1, 4))) for _ in range(chance.randrange(9)))
        rules = TokenRules(allowed_ids=tuple(chance.sample(ids, chance.randrange(3))), banned=banned)
        mask, held_back = chance.sample(ids, chance.randrange(1, 4)), chance.sample(ids, chance.randrange(3))
        left = [
            token
            for token in mask
            if token not in held_back
            and (not rules.allowed_ids or token in rules.allowed_ids)
            and not any((*after, token)[-len(ids) :] == ids for ids in banned)
        ]
        assert rules.leave_any_of(mask_of(mask), after, held_back) is bool(left)
