"""Random histories of the core: whatever is submitted, cancelled, preempted or lost, every rule holds after every
operation, and every text is the one its prompt alone would have given."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.audit import audit
from scheduler_svc.core.cache_events import CacheEvents
from scheduler_svc.core.plan import Amounts, Lease, Plan
from scheduler_svc.core.scheduler import NeverFits, Scheduler
from scheduler_svc.core.sequence import EndReason, Sampling, Sequence, State
from scheduler_svc.core.tenants import TenantLimits, Tenants
from tests.core.beam_oracle import beam_answers
from tests.core.beams import beams_of
from tests.core.histories import leases, requests, searches, thirds
from tests.core.plain_executor import PlainExecutor, continuation, packed, prompt_scores
from tests.core.plan_checks import Lent, PlanChecks


class Core(RuleBasedStateMachine):
    """One scheduler, one plain executor, up to two plans between them."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[bytes] = set()  # what the follower takes for cached
        self.waiting_plans: list[Plan] = []
        self.sequences: list[Sequence] = []
        self.leader_of: dict[Sequence, Sequence] = {}
        self.cancelled: set[Sequence] = set()
        self.searches: list[tuple[list[Sequence], dict]] = []
        self.found: set[Sequence] = set()
        self.attached = False

    @initialize(
        prefix_caching=st.sampled_from([True, True, False]),
        lease=leases,
        several=st.lists(requests, min_size=2, max_size=6),
        found=st.lists(searches, max_size=3),
    )
    def begin(self, prefix_caching: bool, lease: dict, several: list[dict], found: list[dict]) -> None:
        queue = AdmissionQueue(Accounts(Tenants({"heavy": TenantLimits(weight=4.0)}), ageing_tokens=60))
        events = CacheEvents(max_waiting=20)
        self.follower = events.follow(lambda: None)
        self.scheduler = Scheduler(prefix_caching=prefix_caching, queue=queue, cache_events=events)
        self.attach(lease)
        for request in several:
            self.submit(request)
        for search in found:
            self.search(search)

    @precondition(lambda self: not self.attached)
    @rule(lease=leases)
    def attach(self, lease: dict) -> None:
        self._attach(**lease)

    def _attach(
        self,
        num_blocks: int,
        num_rows: int,
        tokens_to_spare: int,
        block_size: int,
        max_model_len: int,
        rope_switch_len: int,
    ) -> None:
        # Ids as a lease may have them: without order, never 0.
        blocks, rows = list(range(3 * num_blocks, 0, -3)), list(range(num_rows, 0, -1))
        self.lease = Lease(
            blocks,
            rows,
            num_rows + tokens_to_spare,
            block_size,
            max_model_len=max_model_len,
            rope_switch_len=rope_switch_len,
        )
        hopeless = self.scheduler.attach(self.lease)
        assert all(s.state is State.ENDED for s in hopeless)
        others = {answer for answers, _ in self.searches for answer in answers[1:]}
        assert not any(self.scheduler.state.bound(s) for s in hopeless if s not in others)
        self.executor = PlainExecutor(self.lease)
        self.lent = Lent(self.scheduler, self.lease)
        self.attached = True

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        """Others are to have a part of the lease; at most all of it."""
        held = self.lent.held
        rows = data.draw(st.integers(0, held.rows))
        tokens = data.draw(st.integers(min(rows + 1, held.tokens), held.tokens))
        self.lent.recall(Amounts(data.draw(st.integers(0, held.blocks)), rows, tokens))

    @precondition(lambda self: self.attached and any(self.lent.elsewhere))
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        blocks, rows, tokens = (data.draw(st.integers(0, amount)) for amount in self.lent.elsewhere)
        held = self.lent.held
        self.lent.grant(Amounts(blocks, max(0, min(rows, held.tokens + tokens - held.rows)), tokens))

    @precondition(lambda self: self.attached)
    @rule(suspected=st.booleans())
    def lose(self, suspected: bool) -> None:
        for sequence in self.scheduler.detach():
            sequence.alone = suspected
        self.waiting_plans.clear()
        self.attached = False

    @rule(request=requests)
    def submit(self, request: dict) -> None:
        self._submit(**request)

    def _submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        end_ids: tuple[int, ...],
        salt: str,
        num_samples: int,
        masked: bool,
        place: dict,
        scored: bool,
    ) -> None:
        name, told = f"r{len(self.sequences)}", {"end_token_ids": end_ids, "cache_salt": salt, **place}
        samplings = [
            Sampling(index=index, prompt_logprobs=0 if scored and not index else None) for index in range(num_samples)
        ]
        samples = [Sequence(name, prompt, max_tokens, sampling, **told) for sampling in samplings]
        for sample in samples:
            sample.masked = masked
            if masked:
                self.scheduler.allow(sample, packed(thirds([])))
        first, *samples[0].held = samples
        try:
            self.scheduler.submit(first)
        except NeverFits:
            assert first.state is State.NEW
            assert not self.scheduler.state.bound(first)
        else:
            self.sequences += samples
            self.leader_of |= dict.fromkeys(samples[1:], first)

    @rule(search=searches)
    def search(self, search: dict) -> None:
        search = {**search, "returned": min(search["returned"], search["width"])}
        answers = beams_of(**search)
        try:
            self.scheduler.submit(answers[0])
        except NeverFits:
            assert not self.scheduler.state.bound(answers[0])
        else:
            self.searches.append((answers, search))

    @precondition(lambda self: self.searches)
    @rule(data=st.data())
    def cancel_search(self, data: st.DataObject) -> None:
        answers, _ = data.draw(st.sampled_from(self.searches))
        self._cancel(answers[::-1])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._cancel([data.draw(st.sampled_from(self.sequences))])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel_all_samples(self, data: st.DataObject) -> None:
        """As the engine does it: those that are held go before the one that holds them."""
        name = data.draw(st.sampled_from(self.sequences)).request_id
        self._cancel([sequence for sequence in reversed(self.sequences) if sequence.request_id == name])

    def _cancel(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.cancel(sequence)
            self.cancelled.add(sequence)

    @precondition(lambda self: self.attached)
    @rule()
    def flush(self) -> None:
        cached = len(self.scheduler.state.cache)
        assert self.scheduler.flush_prefix_cache() == cached
        assert len(self.scheduler.state.cache) == 0

    @precondition(lambda self: self.attached and len(self.waiting_plans) < 2)
    @rule(times=st.integers(1, 3))
    def plan(self, times: int) -> None:
        for _ in range(min(times, 2 - len(self.waiting_plans))):
            self._plan()

    @precondition(lambda self: self.attached)
    @rule(times=st.integers(1, 12), ahead=st.integers(1, 2))
    def go_on(self, times: int, ahead: int) -> None:
        for _ in range(times):
            while len(self.waiting_plans) < ahead and self._plan():
                pass
            if self.waiting_plans:
                self.apply(not_finite=False)

    def _plan(self) -> bool:
        checks = PlanChecks(self.scheduler)
        held, is_recalled = self.lent.held, self.lent.is_recalled
        plan = self.scheduler.plan()
        if plan is None:
            assert not is_recalled, "what was recalled waits for a plan that has something to do"
            return False
        self.waiting_plans.append(plan)
        self.lent.check(plan, held)
        checks.check(plan)
        return True

    @precondition(lambda self: any(s.needs_mask for s in self.sequences))
    @rule(data=st.data(), most=st.integers(1, 4))
    def allow(self, data: st.DataObject, most: int) -> None:
        """Masks come when they are ready, in any order."""
        for _ in range(most):
            waiting = [s for s in self.sequences if s.needs_mask and s.state is not State.ENDED]
            if waiting:
                self._allow(data.draw(st.sampled_from(waiting)))

    def _allow(self, sequence: Sequence) -> None:
        if allowed := thirds(sequence.token_ids[sequence.num_prompt :]):
            self.scheduler.allow(sequence, packed(allowed))
        else:
            self.scheduler.complete(sequence)

    @precondition(lambda self: self.waiting_plans)
    @rule(not_finite=st.sampled_from([False, False, False, True]))
    def apply(self, not_finite: bool) -> None:
        result = self.executor.run(self.waiting_plans.pop(0))
        if not_finite and len(result.tokens):
            result.tokens[0] = -1
        applied = self.scheduler.apply(result)
        for sequence in applied.updated:
            sequence.alone = False
        assert all(sequence.state is State.ENDED for sequence in applied.ended)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        audit(self.scheduler.state)

    @invariant()
    def nobody_is_forgotten_or_comes_back(self) -> None:
        assert all(sequence.state is State.ENDED for sequence in self.cancelled)
        for sequence in self.sequences:
            if sequence.state is State.HELD:
                leader = self.leader_of[sequence]
                assert sequence in leader.held
                assert leader.state is State.WAITING or leader in self.scheduler.state.leaders

    @invariant()
    def the_follower_knows_what_is_cached(self) -> None:
        while (news := self.follower.take(7)) is not None:
            self.told = set() if news.starts_anew else self.told
            for kind, digest in news.events:
                match kind:
                    case "stored":
                        assert digest not in self.told
                        self.told.add(digest)
                    case "removed":
                        self.told.remove(digest)
                    case "cleared":
                        self.told.clear()
        assert self.told == set(self.scheduler.state.cache_events.hashes)
        assert len(self.told) == len(self.scheduler.state.cache)

    @invariant()
    def every_text_is_exact(self) -> None:
        for sequence in self.sequences:
            length = max(sequence.max_total, len(sequence.token_ids))
            prompt, index = sequence.token_ids[: sequence.num_prompt], sequence.sampling.index
            rule = thirds if sequence.masked else None
            expected = continuation(prompt, sequence.end_token_ids, length, index, rule)
            output = sequence.token_ids[sequence.num_prompt :]
            assert output == expected[: len(output)]
            if sequence.end_reason is EndReason.COMPLETE:
                assert output == expected
                assert not thirds(output)
            if sequence.end_reason in (EndReason.END_TOKEN, EndReason.LENGTH):
                assert output == expected
                assert (sequence.end_reason is EndReason.END_TOKEN) == (output[-1] in sequence.end_token_ids)

    @invariant()
    def every_search_is_exact(self) -> None:
        for answers, search in self.searches:
            first = answers[0]
            if first.end_reason not in (EndReason.END_TOKEN, EndReason.LENGTH):
                assert all(answer.num_output == 0 for answer in answers)
                continue
            if first in self.found:
                continue
            self.found.add(first)
            prompt = search["prompt"]
            given = {name: search[name] for name in ("length_penalty", "early_stopping", "end_ids", "min_tokens")}
            expected = beam_answers(prompt, search["width"], first.max_total - len(prompt), **given)[: len(answers)]
            assert [(answer.token_ids[len(prompt) :], answer.score) for answer in answers] == expected

    @invariant()
    def every_log_probability_of_a_prompt_is_exact(self) -> None:
        for sequence in self.sequences:
            prompt, scores = sequence.token_ids[: sequence.num_prompt], sequence.prompt_logprobs
            asked = sequence.sampling.prompt_logprobs is not None
            assert list(scores) == prompt_scores(tuple(prompt))[: len(scores)]
            if sequence.num_output:
                assert len(scores) == (len(prompt) - 1 if asked else 0)

    def teardown(self) -> None:
        """Everything that is still wanted ends, in a bounded number of steps, and leaves no block behind."""
        if not self.attached:
            self._attach(60, 5, 40, 4, 1000, 0)
        self.lent.grant(self.lent.elsewhere)
        for _ in range(1000 + 600 * (len(self.sequences) + len(self.searches))):
            while len(self.waiting_plans) < 2 and self._plan():
                pass
            waiting = [s for s in self.sequences if s.needs_mask and s.state is not State.ENDED]
            if not (self.waiting_plans or waiting):
                break
            if self.waiting_plans:
                self.apply(not_finite=False)
            for sequence in waiting:
                self._allow(sequence)
        assert all(sequence.state is State.ENDED for sequence in self.sequences)
        assert all(answer.state is State.ENDED for answers, _ in self.searches for answer in answers)
        assert (self.scheduler.state.groups, self.scheduler.state.forks) == ({}, [])
        audit(self.scheduler.state)
        assert self.scheduler.state.cache.pool.num_used == 0
        self.every_text_is_exact()
        self.every_search_is_exact()
        self.every_log_probability_of_a_prompt_is_exact()


budget = settings(max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
TestCore = Core.TestCase
TestCore.settings = budget


@pytest.mark.slow
class TestCoreForLong(Core.TestCase):
    settings = settings(budget, max_examples=1000, stateful_step_count=80)
