"""Three schedulers and two executors in containers: right answers, whoever is killed, added or taken away."""

import json

import pytest

from executor_svc.simulated.byte_tokenizer import make_bundle
from executor_svc.simulated.text import simulated_continuation
from scheduler_svc.text.tokenizer import Tokenizer
from tests.containers.stack import VOCAB_SIZE, Answers, Container, Stack, until

pytestmark = pytest.mark.slow

MAX_SCHEDULER_BYTES = 180_000_000
BASE_IMAGE, SCHEDULER_IMAGE = "paged-base:proof", "paged-scheduler:latest"


@pytest.fixture(scope="module")
def scaled(stack: Stack) -> Stack:
    stack.overrides = ("compose.simulate.yaml", "tests/containers/steps.yaml")
    stack.up(schedulers=3, executors=2)
    return stack


def test_answers_are_right_and_come_from_all(scaled: Stack) -> None:
    answers = Answers.of(scaled.calling("60", "32", "60"))
    answers.check_exact(60, 32)
    assert len(answers.tokens_by_scheduler) == 3
    assert all(answers.tokens_by_scheduler.values()), answers.tokens_by_scheduler
    for executor in scaled.containers("executor"):
        assert executor.metric(9101, "paged_executor_steps_total") > 0


def test_a_scheduler_is_killed_while_calls_run(scaled: Stack) -> None:
    caller = scaled.calling("60", "600", "60")
    until(lambda: len(_busy(scaled)) == 3, "calls that run")
    killed = _busy(scaled)[0]
    killed.crash()
    Answers.of(caller).check_exact(60, 600)
    until(lambda: killed.times_started == 2, "a scheduler that is started again")
    until(lambda: scaled.healthy("scheduler") == 3, "three healthy schedulers")


def test_an_executor_is_killed_while_calls_run(scaled: Stack) -> None:
    caller = scaled.calling("60", "600", "60")
    until(lambda: len(_busy(scaled)) == 3, "calls that run")
    killed = scaled.containers("executor")[0]
    killed.crash()
    Answers.of(caller).check_exact(60, 600)
    until(lambda: killed.times_started == 2, "an executor that is started again")
    until(lambda: scaled.healthy("executor") == 2, "two healthy executors")


def test_more_schedulers_get_calls_and_fewer_lose_none(scaled: Stack) -> None:
    scaled.up(schedulers=5, executors=3)
    answers = Answers.of(scaled.calling("60", "32", "60"))
    answers.check_exact(60, 32)
    assert len(answers.tokens_by_scheduler) == 5
    caller = scaled.calling("60", "600", "30")
    until(lambda: len(_busy(scaled)) == 5, "calls that run")
    scaled.up(schedulers=2, executors=1)
    Answers.of(caller).check_exact(60, 600)
    assert len(scaled.containers("scheduler")) == 2
    assert len(scaled.containers("executor")) == 1


def test_the_gateway_follows_schedulers(scaled: Stack) -> None:
    url = "http://127.0.0.1:8000/v1/completions"
    body = {"model": "simulated", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    for count in (2, 3, 1):
        scaled.up(schedulers=count, executors=1, profile=["gateway"])
        (gateway,) = scaled.containers("gateway")
        there = {f"grpc://{address}:50051" for one in scaled.containers("scheduler") for address in one.addresses}
        until(lambda there=there: _workers(scaled) <= there, "a file without those that are gone")
        until(lambda count=count: len(_workers(scaled)) == count, "a file of all that are there")
        until(lambda gateway=gateway: _known(gateway) == _workers(scaled), "a gateway that knows them")
        until(lambda gateway=gateway: gateway.fetch(url, body), "a gateway that has the tokenizer")
        for _ in range(6):  # none is sent where nobody is
            answer = gateway.fetch(url, body)
            assert answer is not None
            assert json.loads(answer)["choices"][0]["text"] == _said("Once upon a time", 8)


def test_how_many_there_are_stays_where_the_environment_says_it(scaled: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_SCHEDULERS", "2")
    monkeypatch.setenv("PAGED_EXECUTORS", "2")
    for _ in range(2):
        scaled.compose("up", "--detach", "--no-build", "--wait")
        assert [len(scaled.containers(service)) for service in ("scheduler", "executor")] == [2, 2]


def test_containers_may_next_to_nothing(scaled: Stack) -> None:
    for service in ("scheduler", "executor"):
        container = scaled.containers(service)[0]
        assert container.execute("id", "-u").stdout.strip() == "10001"
        status = container.execute("cat", "/proc/self/status").stdout
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert container.execute("touch", "/opt/paged/x", check=False).returncode != 0
        assert container.execute("touch", "/var/lib/paged/x", check=False).returncode != 0


def test_a_schedulers_image_is_small_and_has_no_compiler_and_no_torch(scaled: Stack) -> None:
    container = scaled.containers("scheduler")[0]
    for command in ("gcc", "g++", "pip"):
        assert container.execute("sh", "-c", f"command -v {command}", check=False).returncode != 0
    assert container.execute("python", "-c", "import torch", check=False).returncode != 0
    base, whole = (scaled.image_bytes(name) for name in (BASE_IMAGE, SCHEDULER_IMAGE))
    print(f"scheduler's image: {whole / 1e6:.0f} MB, {(whole - base) / 1e6:.0f} MB more than its base")
    assert whole - base < MAX_SCHEDULER_BYTES


def test_with_tls_a_caller_needs_a_token(scaled: Stack) -> None:
    scaled.compose("down", "--timeout", "30")  # their volumes stay, and the keys in them
    scaled.overrides = ("compose.simulate.yaml", "compose.tls.yaml")
    scaled.up(schedulers=2, executors=1)
    run = ["run", "--rm", "--no-deps", "-T"]
    said = scaled.compose(*run, "client", "generate", "--json", "Hello", "--max-tokens", "8")
    assert json.loads(said.stdout)["usage"]["completion_tokens"] == 8
    refused = scaled.compose(*run, "-e", "PAGED_TOKEN_FILE=", "client", "generate", "Hello", check=False)
    assert refused.returncode == 4, refused.stdout + refused.stderr
    unencrypted = [*run, "-e", "PAGED_TLS_ROOT=", "-e", "PAGED_TOKEN_FILE=", "client", "generate", "Hello"]
    assert scaled.compose(*unencrypted, check=False).returncode == 3


def _busy(stack: Stack) -> list[Container]:
    """Schedulers with sequences that run."""
    return [one for one in stack.containers("scheduler") if one.metric(9100, "paged_sequences", 'state="running"') > 0]


def _workers(stack: Stack) -> set[str]:
    """As the sidecar has written them."""
    (sidecar,) = stack.containers("gateway-workers")
    content = json.loads(sidecar.execute("cat", "/run/gateway/workers.json").stdout)
    return {worker["url"] for worker in content["workers"]}


def _known(gateway: Container) -> set[str]:
    """As the gateway tells them."""
    answer = json.loads(gateway.fetch("http://127.0.0.1:8000/workers") or '{"workers": []}')
    return {worker["url"] for worker in answer["workers"]}


def _said(prompt: str, max_tokens: int) -> str:
    """By the simulated model; the gateway puts no begin token before a prompt."""
    ids = simulated_continuation(list(prompt.encode()), max_tokens, vocab_size=VOCAB_SIZE, end_token_ids=(257,))
    return Tokenizer.from_bundle(make_bundle(VOCAB_SIZE, 4096, 257)).decode(ids, True)
