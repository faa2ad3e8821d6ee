"""An executor process over real ZeroMQ: sessions begin and end by the rules, and nothing a peer sends stops it."""

import hashlib
import io
import pickle
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor_svc.service import MAX_EPOCHS_WITHOUT_STEP
from executor_svc.sessions import MAX_WAITING
from executor_svc.simulated.text import simulated_continuation
from paged.v1.executor_pb2 import Fault, GetTokenizer, StepPlan
from tests.executor.client import PlanClient
from tests.executor.oracle import PROMPT, VOCAB, decode, prefill, says_the_oracle
from tests.executor.plans import ids_of, sampling, schedule
from tests.executor.plans import start as start_row
from tests.processes import Service, wait_for


def test_a_lone_scheduler_is_lent_everything_but_block_0(client: PlanClient) -> None:
    lease = client.attached.lease
    assert ids_of(lease.block_ids) == list(range(1, 64))
    assert ids_of(lease.row_ids) == list(range(8))
    assert (lease.tokens_per_step, lease.plans_in_flight) == (32, 3)
    assert client.attached.model.vocab_size == VOCAB
    assert client.attached.worst_step_ms >= 1


def test_plans_are_answered_with_the_oracles_tokens(client: PlanClient) -> None:
    assert says_the_oracle(client)


def test_two_plans_in_flight_are_answered_in_order(client: PlanClient) -> None:
    client.send_plan(prefill())
    client.send_plan(decode())
    results = [client.result(), client.result()]
    assert [result.step for result in results] == [1, 2]
    said = [token for result in results for token in ids_of(result.sampled_ids)]
    assert said == simulated_continuation(PROMPT, 2, vocab_size=VOCAB)


def test_an_executor_waits_for_plans_that_are_not_at_hand_alone(start: Callable[..., Service]) -> None:
    with PlanClient(start("--simulate-fixed-us", "500000").address) as client:
        client.attach()
        client.send_plan(prefill())
        client.send_plan(decode())
        assert client.result().wait_us > 0
        assert client.result().wait_us == 0


def test_logprobs_come_with_the_rows_that_asked(client: PlanClient) -> None:
    plan = StepPlan(started=[start_row(0, PROMPT, [1], parameters=sampling(logprobs=2)), start_row(1, PROMPT, [2])])
    result = client.run(schedule(plan, (0, 5, True), (1, 5, True)))
    assert len(ids_of(result.sampled_ids)) == 2
    assert ids_of(result.logprob_ids)[0] == ids_of(result.sampled_ids)[0]
    assert (len(result.logprob_ids), len(result.logprobs), len(result.logprob_ranks)) == (12, 12, 4)


def test_an_empty_plan_is_answered_and_runs_no_step(start: Callable[..., Service], tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"faults": [{"step": 1, "kind": "raise"}]}')
    with PlanClient(start("--simulate-script", str(script)).address) as client:
        client.attach()
        for _ in range(5):
            assert client.run().sampled_ids == b""
        client.send_plan(prefill())
        assert client.fault().scope == Fault.SCOPE_EPOCH


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"step": 3}, "step: 3"),
        ({"step": 1}, "step: 1"),
        ({"epoch": 1}, "epoch: 1"),
        ({"session": 77}, "session: 77"),
    ],
    ids=["gap", "repeat", "foreign epoch", "foreign session"],
)
def test_a_plan_with_wrong_numbers_ends_the_session(client: PlanClient, numbers: dict[str, int], named: str) -> None:
    client.run(prefill())
    client.send_plan(decode(), **numbers)
    fault = client.fault()
    assert (fault.scope, fault.session) == (Fault.SCOPE_SESSION, client.attached.session)
    assert named in fault.reason
    client.send_plan()
    assert "attach first" in client.fault().reason
    client.attach()
    assert says_the_oracle(client)


def test_a_violation_ends_the_session_with_its_reason(client: PlanClient) -> None:
    client.run(prefill())
    client.send_plan(schedule(StepPlan(), (0, 2, True)))
    fault = client.fault()
    assert (fault.scope, fault.step) == (Fault.SCOPE_SESSION, 2)
    assert "scheduled_tokens" in fault.reason
    client.attach()
    assert says_the_oracle(client), "rows of the session that ended are free"


def test_more_plans_than_may_be_in_flight_end_the_session(start: Callable[..., Service]) -> None:
    with PlanClient(start("--simulate-fixed-us", "300000").address) as client:
        client.attach()
        client.send_plan(prefill())
        for _ in range(4):
            client.send_plan()
        message = client.receive()
        if message.HasField("result"):  # the first was already running when the others came
            message = client.receive()
        assert "plans in flight" in message.fault.reason


def test_a_plan_without_a_session_is_answered_with_a_fault(executor: Service) -> None:
    with PlanClient(executor.address) as client:
        client.send_plan(epoch=5, session=9)
        fault = client.fault()
        assert (fault.scope, fault.session) == (Fault.SCOPE_SESSION, 9)


def test_a_strangers_plan_does_not_end_the_session_it_names(executor: Service, client: PlanClient) -> None:
    with PlanClient(executor.address) as stranger:
        stranger.send_plan(epoch=client.attached.epoch, session=client.attached.session)
        assert stranger.fault().scope == Fault.SCOPE_SESSION
    assert says_the_oracle(client)


def test_a_known_scheduler_ends_its_older_session(executor: Service, client: PlanClient) -> None:
    with PlanClient(executor.address) as restarted:
        attached = restarted.attach("one")
        assert attached.epoch == client.attached.epoch
        assert attached.session != client.attached.session
        assert "attached anew" in client.fault().reason
        assert says_the_oracle(restarted)


def test_a_second_scheduler_waits_until_the_first_detaches(executor: Service, client: PlanClient) -> None:
    with PlanClient(executor.address) as second:
        second.ask_to_attach("two")
        assert second.hears_nothing(0.3)
        client.run(prefill())
        client.detach()
        second.wait_attached()
        assert says_the_oracle(second)


def test_a_waiting_scheduler_that_asks_again_is_let_in_once(executor: Service, client: PlanClient) -> None:
    with PlanClient(executor.address) as old, PlanClient(executor.address) as new:
        old.ask_to_attach("two")
        assert old.hears_nothing(0.2)
        new.ask_to_attach("two")
        assert new.hears_nothing(0.2)
        client.detach()
        new.wait_attached()
        assert says_the_oracle(new)
        assert old.hears_nothing(0.2)


def test_only_so_many_schedulers_may_wait(executor: Service, client: PlanClient) -> None:
    with ExitStack() as stack:
        for number in range(MAX_WAITING):
            waiting = stack.enter_context(PlanClient(executor.address))
            waiting.ask_to_attach(f"waiting {number}")
        assert waiting.is_kept_waiting()
        client.run()
        late = stack.enter_context(PlanClient(executor.address))
        late.ask_to_attach("late")
        assert "try again" in late.fault().reason
        client.run()
    with PlanClient(executor.address) as late:

        def let_in_line() -> bool:
            late.ask_to_attach("late")
            return late.is_kept_waiting()

        wait_for(let_in_line, "those who have gone to be forgotten")
        client.detach()
        late.wait_attached()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_scheduler_that_is_lost_makes_room_for_the_next(start: Callable[..., Service], fate: signal.Signals) -> None:
    executor = start("--session-timeout-s", "1")
    command = [sys.executable, "-m", "tests.executor.client", executor.address, "one"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline().strip() == b"1"
            first.send_signal(fate)
            with PlanClient(executor.address) as second:
                assert second.attach("two").session == 2
                assert says_the_oracle(second)
        finally:
            first.kill()


def test_a_silent_scheduler_is_ended_and_told(start: Callable[..., Service]) -> None:
    with PlanClient(start("--session-timeout-s", "0.3").address) as client:
        client.attach()
        assert "silent for more than 0.3 s" in client.fault().reason


def test_empty_plans_keep_a_session_alive(start: Callable[..., Service]) -> None:
    with PlanClient(start("--session-timeout-s", "2").address) as client:
        client.attach()
        for _ in range(5):
            client.run()
            assert client.hears_nothing(0.5)


def test_another_protocol_version_is_refused_for_good(executor: Service) -> None:
    with PlanClient(executor.address) as client:
        client.ask_to_attach("one", version=2)
        fault = client.fault()
        assert fault.scope == Fault.SCOPE_REFUSED
        assert "protocol_version 2" in fault.reason


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return open, ("bomb", "w")


def test_garbage_is_dropped_and_nobody_suffers(executor: Service, client: PlanClient) -> None:
    with PlanClient(executor.address) as garbage:
        garbage.send_bytes(pickle.dumps(Bomb()))
        garbage.send_bytes(b"\xff" * 1000)
        garbage.send_bytes(b"")
        garbage.send_bytes(b"several", b"frames")
        garbage.send_bytes(b"", b"as a REQ socket sends")
        garbage.send(get_tokenizer=GetTokenizer())
        assert garbage.receive().HasField("tokenizer_chunk")
    assert says_the_oracle(client)
    assert executor.log.count("message_dropped") == 1, "one line for each peer"
    assert not Path("bomb").exists()


def test_bytes_that_are_no_zeromq_are_survived(executor: Service, client: PlanClient) -> None:
    host, port = executor.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"\xff\x00\x00\x00\x00\x3b\x9a\xca\x00\x7f" + b"A" * 4096)
    assert says_the_oracle(client)


def test_a_message_above_the_limit_cuts_only_its_sender(start: Callable[..., Service]) -> None:
    executor = start("--max-message-bytes", str(1 << 22))
    with PlanClient(executor.address) as client, PlanClient(executor.address) as sender:
        client.attach("one")
        sender.send_bytes(b"\0" * ((1 << 22) + 1))
        sender.ask_to_attach("two")
        assert says_the_oracle(client)


def test_a_failed_step_ends_the_epoch_for_everybody(start: Callable[..., Service], tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"faults": [{"step": 2, "kind": "raise"}]}')
    executor = start("--simulate-script", str(script))
    with PlanClient(executor.address) as client, PlanClient(executor.address) as waiting:
        old = client.attach("one")
        waiting.ask_to_attach("two")
        assert waiting.is_kept_waiting()
        client.run(prefill())
        client.send_plan(decode())
        client.send_plan()
        fault = client.fault()
        assert (fault.scope, fault.epoch, fault.step) == (Fault.SCOPE_EPOCH, old.epoch, 2)
        assert waiting.wait_attached().epoch == old.epoch + 1
        assert says_the_oracle(waiting)
    assert "scripted failure" in executor.log


def test_what_a_failed_step_logs_tells_nothing_of_prompts(start: Callable[..., Service], tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"faults": [{"step": 1, "kind": "raise"}]}')
    executor = start("--simulate-script", str(script), "--simulate-vocab-size", "200000")
    with PlanClient(executor.address) as client:
        client.attach()
        client.send_plan(schedule(StepPlan(started=[start_row(0, [177771, 177772], [1])]), (0, 2, True)))
        assert client.fault().scope == Fault.SCOPE_EPOCH
    assert "scripted failure" in executor.log
    assert "executor_svc/stepper.py" in executor.log, "where it failed"
    assert "17777" not in executor.log


def test_an_executor_that_always_fails_gives_up(start: Callable[..., Service], tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(f'{{"faults": [{{"row_of_prompt": {PROMPT}, "kind": "raise"}}]}}')
    executor = start("--simulate-script", str(script))
    with PlanClient(executor.address) as client:
        for _ in range(MAX_EPOCHS_WITHOUT_STEP):
            client.attach()
            client.send_plan(prefill())
            assert client.fault().scope == Fault.SCOPE_EPOCH
    assert executor.process.wait(10) == 1


def test_no_two_processes_count_the_same_epochs(start: Callable[..., Service]) -> None:
    with PlanClient(start().address) as first, PlanClient(start().address) as second:
        assert first.attach().epoch != second.attach().epoch


def test_the_tokenizer_comes_whole_with_or_without_a_session(start: Callable[..., Service]) -> None:
    executor = start("--simulate-vocab-size", "200000")
    with PlanClient(executor.address) as client, PlanClient(executor.address) as other:
        for asker in (client, other):
            asker.send(get_tokenizer=GetTokenizer())
        bundles = []
        for asker in (client, other):
            data = b""
            while True:
                chunk = asker.receive().tokenizer_chunk
                assert chunk.offset == len(data)
                data += chunk.data
                if len(data) >= chunk.total_bytes:
                    break
            bundles.append(data)
        assert bundles[0] == bundles[1]
        assert len(bundles[0]) > 256 << 10
        assert hashlib.sha256(bundles[0]).hexdigest() == client.attach().tokenizer_hash
        assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(bundles[0])).namelist()


def test_steps_go_on_while_the_tokenizer_is_sent(start: Callable[..., Service]) -> None:
    executor = start("--simulate-vocab-size", "200000")
    with PlanClient(executor.address) as client, PlanClient(executor.address) as asker:
        client.attach()
        for _ in range(20):
            asker.send(get_tokenizer=GetTokenizer())
        assert says_the_oracle(client, vocab_size=200000)
        assert asker.receive().HasField("tokenizer_chunk")
