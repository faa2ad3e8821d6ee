"""Random histories of several schedulers on several executors: whatever is delayed, lost, frozen, killed and started
anew, no block is in two leases and none is lost, no plan of a session that is over is carried out, every text is exact,
and in the end everything that is still wanted is there."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from executor_svc.settings import ExecutorSettings
from executor_svc.simulated.text import simulated_continuation
from scheduler_svc.core.sequence import Sampling, Sequence, State
from tests.system.network import Clock, Connection
from tests.system.nodes import ExecutorNode, Link

VOCAB_SIZE, MAX_LEN = 300, 150
STEMS = [list(range(100, 250)), [i * i % 97 for i in range(150)]]
prompts = st.builds(
    lambda stem, kept, tail: STEMS[stem][:kept] + tail,
    st.integers(0, 1),
    st.one_of(st.integers(0, 20), st.integers(0, 100)),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9),
)
requests = st.fixed_dictionaries(
    {"prompt": prompts, "max_tokens": st.integers(1, 30), "num_samples": st.sampled_from([1, 1, 2, 3])}
)
pools = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(36, 60),
        "max_rows": st.integers(3, 8),
        "spare_tokens": st.integers(3, 30),
        "step_us": st.sampled_from([0.0, 1.0]),  # of a device that computes while the host goes on, if it takes any
    }
)


class Call:
    """One sequence, and what it must come to."""

    def __init__(self, link: Link, sequence: Sequence, max_tokens: int) -> None:
        self.link = link
        self.sequence = sequence
        prompt, sampling = sequence.token_ids, sequence.sampling
        self.expected = simulated_continuation(
            prompt,
            max_tokens,
            vocab_size=VOCAB_SIZE,
            temperature=sampling.temperature,
            seed=sampling.seed,
            index=sampling.index,
        )

    @property
    def output(self) -> list[int]:
        return self.sequence.token_ids[self.sequence.num_prompt :]


class Many(RuleBasedStateMachine):
    """Each scheduler has a link to each executor."""

    @initialize(
        num_schedulers=st.integers(2, 3),
        several=st.lists(pools, min_size=1, max_size=2),
        begun=st.lists(st.tuples(st.integers(0, 5), requests), max_size=6),
    )
    def begin(self, num_schedulers: int, several: list[dict], begun: list[tuple[int, dict]]) -> None:
        self.clock = Clock()
        self.executors = [ExecutorNode(self._settings(**pool), self.clock) for pool in several]
        self.schedulers = [self._new_scheduler(number) for number in range(num_schedulers)]
        self.frozen: set[int] = set()
        self.calls: list[Call] = []
        for number, request in begun:
            links = self._links()
            self._submit(links[number % len(links)], **request)
        self._round()

    def _settings(self, num_blocks: int, max_rows: int, spare_tokens: int, step_us: float) -> ExecutorSettings:
        return ExecutorSettings(
            simulate=True,
            block_size=4,
            num_blocks=num_blocks,
            max_rows=max_rows,
            tokens_per_step=max_rows + spare_tokens,
            simulate_vocab_size=VOCAB_SIZE,
            simulate_max_model_len=MAX_LEN,
            simulate_fixed_us=step_us,
            recall_timeout_s=3.0,
        )

    def _new_scheduler(self, number: int) -> list[Link]:
        return [Link(f"scheduler {number}", executor, self.clock) for executor in self.executors]

    def _links(self) -> list[Link]:
        return [link for links in self.schedulers for link in links]

    def _acting(self) -> list[Link]:
        return [link for i, links in enumerate(self.schedulers) if i not in self.frozen for link in links]

    def _connections(self) -> list[Connection]:
        return [link.connection for link in self._links() if link.connection is not None]

    # --- work ---

    @rule(data=st.data(), request=requests)
    def submit(self, data: st.DataObject, request: dict) -> None:
        self._submit(data.draw(st.sampled_from(self._links())), **request)

    def _submit(self, link: Link, prompt: list[int], max_tokens: int, num_samples: int) -> None:
        samplings = [Sampling(temperature=float(num_samples > 1), seed=7, index=i) for i in range(num_samples)]
        samples = [Sequence(f"r{len(self.calls)}", prompt, max_tokens, sampling) for sampling in samplings]
        self.calls += [Call(link, sample, max_tokens) for sample in samples]
        first, *samples[0].held = samples
        link.submit(first)
        self._maybe_plan(link)

    def _maybe_plan(self, link: Link) -> None:
        if link in self._acting():
            link.plan()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        name, link = call.sequence.request_id, call.link
        for other in reversed([c for c in self.calls if c.link is link and c.sequence.request_id == name]):
            link.core.cancel(other.sequence)
            self.calls.remove(other)
        self._maybe_plan(link)

    # --- time ---

    @rule(data=st.data(), most=st.integers(1, 3))
    def deliver(self, data: st.DataObject, most: int) -> None:
        if connections := self._connections():
            connection = data.draw(st.sampled_from(connections))
            self._executor_of(connection).router.deliver(connection, most)

    def _executor_of(self, connection: Connection) -> ExecutorNode:
        return next(link.executor for link in self._links() if link.connection is connection)

    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.executors)).turn()

    @rule(data=st.data(), most=st.integers(0, 3))
    def act(self, data: st.DataObject, most: int) -> None:
        if links := self._acting():
            data.draw(st.sampled_from(links)).act(most)

    @rule(seconds=st.sampled_from([0.02, 0.3, 1.1, 3.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(rounds=st.integers(1, 12), seconds=st.sampled_from([0.0, 0.02, 0.3]))
    def go_on(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            self._round()
            self.clock.now += seconds

    def _round(self) -> None:
        """Everybody who can does something, and all that was sent arrives."""
        for link in self._acting():
            link.act()
        for connection in self._connections():
            self._executor_of(connection).router.deliver(connection)
        for executor in self.executors:
            executor.turn()

    # --- trouble ---

    @rule(data=st.data())
    def break_a_connection(self, data: st.DataObject) -> None:
        if connections := self._connections():
            data.draw(st.sampled_from(connections)).break_off()

    @rule(data=st.data())
    def silence_a_connection(self, data: st.DataObject) -> None:
        if connections := self._connections():
            data.draw(st.sampled_from(connections)).fall_silent()

    @rule(data=st.data())
    def say_goodbye(self, data: st.DataObject) -> None:
        if links := self._acting():
            data.draw(st.sampled_from(links)).detach()

    @rule(data=st.data())
    def crash_scheduler(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.schedulers) - 1))
        for link in self.schedulers[number]:
            if link.connection is not None:
                link.connection.break_off()
        self.calls = [call for call in self.calls if call.link not in self.schedulers[number]]
        self.schedulers[number] = self._new_scheduler(number)
        self.frozen.discard(number)

    @rule(data=st.data())
    def crash_executor(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.executors)).crash()

    @rule(data=st.data())
    def start_executor(self, data: st.DataObject) -> None:
        if down := [executor for executor in self.executors if not executor.is_up]:
            data.draw(st.sampled_from(down)).start()

    @rule(data=st.data())
    def freeze_or_thaw_scheduler(self, data: st.DataObject) -> None:
        self.frozen ^= {data.draw(st.integers(0, len(self.schedulers) - 1))}

    @rule(data=st.data())
    def freeze_or_thaw_executor(self, data: st.DataObject) -> None:
        executor = data.draw(st.sampled_from(self.executors))
        executor.is_frozen = not executor.is_frozen

    # --- rules ---

    @invariant()
    def no_block_is_in_two_leases_and_none_is_lost(self) -> None:
        for executor in self.executors:
            if not executor.is_up:
                continue
            owned = {number: executor.owned_by(number) for number in executor.sessions}
            ownership = executor.ownership
            assert sum(map(len, owned.values())) + ownership.free.blocks == ownership.most.blocks
            assert all(len(blocks) == ownership.held_by(number).blocks for number, blocks in owned.items())
            for link in self._links():
                if link.executor is executor and link.is_current:
                    self._check_books(link, owned[link.key[1]])

    def _check_books(self, link: Link, owned: set[int]) -> None:
        """What the executor takes for lent to the session is what the scheduler has, and what is on its way."""
        leased = link.core.state.cache.pool.leased
        assert leased <= owned
        if link.connection.is_sound:
            under_way = link.blocks_under_way()
            assert len(set(under_way)) == len(under_way)
            assert leased.isdisjoint(under_way)
            assert leased | set(under_way) == owned

    @invariant()
    def every_text_is_exact(self) -> None:
        for call in self.calls:
            assert call.output == call.expected[: len(call.output)]

    def teardown(self) -> None:
        """All is well again, and everything comes to its end."""
        if not hasattr(self, "calls"):
            return
        self.frozen.clear()
        for executor in self.executors:
            executor.is_frozen = False
            if not executor.is_up:
                executor.start()
        for _ in range(300 + 200 * len(self.calls)):
            if self._is_over():
                break
            self._round()
            self.clock.now += 0.05
        assert all(call.sequence.state is State.ENDED for call in self.calls)
        assert all(call.output == call.expected for call in self.calls)
        for _ in range(100):
            if self._all_is_lent():
                break
            self._round()
            self.clock.now += 0.1
        assert self._all_is_lent()

    def _is_over(self) -> bool:
        return all(call.sequence.state is State.ENDED for call in self.calls)

    def _all_is_lent(self) -> bool:
        """To schedulers that know it, each of which has some and uses nothing of it."""
        for executor in self.executors:
            links = [link for link in self._links() if link.executor is executor]
            pools = [link.core.state.cache.pool for link in links]
            if executor.ownership.free.blocks or executor.ownership.free.tokens or any(p.num_used for p in pools):
                return False
            if sum(pool.num_leased for pool in pools) != executor.ownership.most.blocks:
                return False
            if not all(link.is_current and pool.num_leased for link, pool in zip(links, pools, strict=True)):
                return False
        return True


base = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
TestMany = Many.TestCase
TestMany.settings = settings(base, max_examples=40, stateful_step_count=40)


@pytest.mark.slow
class TestManyForLong(Many.TestCase):
    settings = settings(base, max_examples=300, stateful_step_count=80)
