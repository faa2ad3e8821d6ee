"""Ranks that are only asked for, and weights that change while tenants have something waiting."""

import random

from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.tenants import TenantLimits, Tenants


def asked(name: str, tenant: str, chance: random.Random) -> Sequence:
    return Sequence(
        name, [1] * chance.randrange(1, 50), chance.randrange(1, 100), tenant=tenant, priority=chance.randrange(-1, 2)
    )


def test_a_rank_that_is_only_asked_for_is_the_one_that_is_given_and_charges_nobody() -> None:
    chance = random.Random(0)
    accounts = Accounts(Tenants({"gold": TenantLimits(weight=3.0)}))
    queue = AdmissionQueue(accounts)
    for number in range(200):
        sequence = asked(str(number), chance.choice(["gold", "", "other"]), chance)
        foretold, ahead = accounts.rank_of(sequence), queue.num_ahead(sequence)
        assert accounts.rank_of(sequence) == foretold
        queue.enter(sequence)
        assert sequence.rank == foretold
        assert list(queue).index(sequence) == ahead
        if chance.random() < 0.4:
            ended = chance.choice(list(queue))
            queue.remove(ended)
            queue.settle(ended)


def test_tokens_that_wait_are_known_of_each_tenant_and_names_are_not_kept() -> None:
    chance = random.Random(1)
    queues = [AdmissionQueue(accounts := Accounts())]
    queues.append(AdmissionQueue(accounts))
    waiting: list[tuple[AdmissionQueue, Sequence]] = []
    for number in range(300):
        if waiting and chance.random() < 0.4:
            queue, sequence = waiting.pop(chance.randrange(len(waiting)))
            queue.remove(sequence)
            sequence.token_ids.append(1)  # as a preempted one has more of them when it comes back
            if chance.random() < 0.5:
                queue.push(sequence)
                waiting.append((queue, sequence))
            else:
                queue.settle(sequence)
        else:
            queue, sequence = chance.choice(queues), asked(str(number), chance.choice("abc"), chance)
            queue.enter(sequence)
            waiting.append((queue, sequence))
        for tenant in "abc":
            own = [sequence for _, sequence in waiting if sequence.tenant == tenant]
            assert accounts.waiting_tokens[tenant] == sum(len(sequence.token_ids) for sequence in own)
        assert accounts.num_waiting_tokens == sum(len(sequence.token_ids) for _, sequence in waiting)
    for queue, sequence in waiting:
        queue.remove(sequence)
    assert not accounts.waiting_tokens
    assert accounts.num_waiting_tokens == 0


def test_a_weight_holds_from_the_tenants_next_request_on() -> None:
    tenants = Tenants()
    queue = AdmissionQueue(Accounts(tenants))
    tenants.replace({"late": TenantLimits(weight=4.0)})
    for number in range(4):
        queue.enter(Sequence(f"other{number}", [1] * 100, 1, tenant="other"))
    for number in range(4):
        queue.enter(Sequence(f"late{number}", [1] * 100, 1, tenant="late"))
    names = [sequence.request_id for sequence in queue]
    assert names.index("late2") < names.index("other0") < names.index("late3") < names.index("other1")


def test_what_was_stated_at_the_start_holds_where_nothing_else_is_said() -> None:
    tenants = Tenants({"gold": TenantLimits(weight=3.0)}, TenantLimits(max_requests=5))
    tenants.replace({"gold": TenantLimits(max_requests=9), "new": TenantLimits(weight=2.0)})
    assert tenants.limits("gold") == TenantLimits(max_requests=9)
    assert tenants.limits("anybody") == TenantLimits(max_requests=5)
    tenants.replace({})
    assert tenants.limits("gold") == TenantLimits(weight=3.0)
    assert tenants.limits("new") == TenantLimits(max_requests=5)
