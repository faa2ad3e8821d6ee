"""Nothing is wrong, lost, repeated or left hanging, whatever dies, freezes or is cut off: exact, on the simulated model
and on a real one whose likeliest tokens are far enough ahead."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor_svc.simulated.byte_tokenizer import make_bundle
from paged.v1.inference_pb2 import BeamSearch
from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.requests import BeamOptions, GenerationRequest
from scheduler_svc.text.grammars import Grammars
from scheduler_svc.text.tokenizer import Tokenizer
from tests.margin import reference_logits, reference_model
from tests.processes import cleaned_up
from tests.system.chaos import Chaos, Linked, Wanted, through_chaos
from tests.system.requests import EOS_ID, Call
from tests.system.simulated_answers import END_IDS, VOCAB_SIZE, right_answers
from tests.system.test_grammars import GRAMMARS, expected, option
from tests.system.test_replicas import PATIENT, assert_every_lease_adds_up
from tests.tiny_models import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.tiny_models import save_tiny

NUM_BLOCKS = 600
POOL = ["--num-blocks", str(NUM_BLOCKS), "--max-rows", "64", "--tokens-per-step", "256", "--simulate-fixed-us", "4000"]
EXECUTOR = ["--simulate", *POOL, "--simulate-vocab-size", str(VOCAB_SIZE)]
EARLY = {
    EarlyStopping.NO: BeamSearch.EARLY_STOPPING_NO,
    EarlyStopping.YES: BeamSearch.EARLY_STOPPING_YES,
    EarlyStopping.NEVER: BeamSearch.EARLY_STOPPING_NEVER,
}
STEMS = [list(range(100, 220)), [i * i % 97 for i in range(120)]]


class Requests:
    """Of all kinds, by chance: samples, the best of several, beams, grammars; half of them begin like others."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._grammars = Grammars(Tokenizer.from_bundle(make_bundle(VOCAB_SIZE, 16384, EOS_ID)), VOCAB_SIZE)

    def __call__(self) -> Wanted:
        return self._chance.choice([self._samples, self._samples, self._best, self._beams, self._constrained])()

    def _prompt(self) -> list[int]:
        chance = self._chance
        stem = chance.choice(STEMS)[: chance.randrange(120)] if chance.random() < 0.5 else []
        return stem + [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 30))]

    def _samples(self) -> Wanted:
        temperature = self._chance.choice([0.0, 1.0])
        sampling = Sampling(temperature=temperature, seed=self._chance.getrandbits(63))
        num_samples = self._chance.choice([1, 1, 3]) if temperature else 1
        return self._unconstrained("samples", sampling, self._chance.randrange(1, 80), num_samples)

    def _best(self) -> Wanted:
        sampling = Sampling(temperature=1.0, seed=self._chance.getrandbits(63))
        return self._unconstrained("best of", sampling, self._chance.randrange(1, 30), 2, best_of=4)

    def _beams(self) -> Wanted:
        early = self._chance.choice(list(EARLY))
        beam = BeamOptions(self._chance.randrange(1, 5), self._chance.choice([0.0, 1.0, 2.0, -1.0]), early)
        return self._unconstrained("beams", Sampling(), self._chance.randrange(1, 17), beam.width, beam=beam)

    def _unconstrained(
        self,
        kind: str,
        sampling: Sampling,
        max_tokens: int,
        num_samples: int,
        best_of: int | None = None,
        beam: BeamOptions | None = None,
    ) -> Wanted:
        ends = self._chance.choice([(), END_IDS])
        request = GenerationRequest(
            kind, self._prompt(), sampling, max_tokens,
            stop_token_ids=ends, ignore_eos=True, num_samples=num_samples, best_of=best_of, beam=beam,
        )  # fmt: skip
        options: dict = {"max_tokens": max_tokens, "n": num_samples, "stop_token_ids": ends, "ignore_eos": True}
        if beam is None:
            options |= {"temperature": sampling.temperature, "seed": sampling.seed, "best_of": best_of}
        else:
            early = EARLY[beam.early_stopping]
            options["beam"] = BeamSearch(width=beam.width, length_penalty=beam.length_penalty, early_stopping=early)
        return Wanted(kind, request.prompt_ids, options, [ids for ids, _ in right_answers(request)])

    def _constrained(self) -> Wanted:
        grammar = self._chance.choice(GRAMMARS)
        num_samples = self._chance.choice([1, 3])
        call = Call(self._prompt(), self._chance.randrange(1, 60), 1.0, self._chance.getrandbits(63), "", num_samples)
        options = {
            "max_tokens": call.max_tokens, "n": num_samples, "temperature": 1.0, "seed": call.seed, **option(grammar)
        }  # fmt: skip
        right = [expected(self._grammars, grammar, call, index) for index in range(num_samples)]
        return Wanted("grammar", call.prompt, options, right)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    """Prints a line that is seen, whatever becomes of the test."""

    def tell(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", flush=True)

    return tell


@pytest.mark.parametrize(
    ("num_faults", "concurrency", "seed"),
    [
        pytest.param(9, 40, 1, id="short"),
        pytest.param(100, 200, 2, id="long", marks=pytest.mark.slow),
    ],
)
async def test_every_answer_is_exact_through_faults_of_every_kind(
    tmp_path: Path, told: Callable[[str], None], num_faults: int, concurrency: int, seed: int
) -> None:
    with cleaned_up([]) as services:
        replicas = Linked(tmp_path, services, EXECUTOR, PATIENT)
        await replicas.start_linked(num_schedulers=2, num_executors=2)
        await replicas.idle_loads()
        chaos = Chaos(replicas, random.Random(seed), pause_s=1.0)
        made = await through_chaos(
            chaos,
            replicas.target,
            Requests(random.Random(seed)),
            concurrency=concurrency,
            num_faults=num_faults,
            end_s=60,
        )
        loads = await replicas.idle_loads()
        await assert_every_lease_adds_up(replicas, NUM_BLOCKS)
        await replicas.close()
    kinds = Counter(wanted.kind for wanted in made)
    again = sum(wanted.attempts - 1 for wanted in made)
    told(
        f"chaos: {sum(chaos.counts.values())} faults {dict(chaos.counts)}; {len(made)} calls {dict(kinds)}, "
        f"{sum(len(ids) for wanted in made for ids in wanted.expected)} tokens, asked again {again} times, "
        f"{sum(load.executor_losses for load in loads)} losses since the schedulers' last starts; "
        "wrong 0, lost or repeated 0, hung 0, blocks in use 0"
    )
    assert sum(chaos.counts.values()) == num_faults
    assert len(kinds) == 4
    assert len(made) >= concurrency


MIN_GAP = 1e-3  # nats between the two likeliest tokens: far more than another order of sums makes
ANSWER_TOKENS = 48


def sure_answers(directory: Path, count: int, chance: random.Random) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what Hugging Face says to each, where it is sure of every token."""
    model, found = reference_model(directory), []
    while len(found) < count:
        prompt = [chance.randrange(TINY_VOCAB_SIZE) for _ in range(chance.randrange(1, 40))]
        ids = list(prompt)
        for _ in range(ANSWER_TOKENS):
            likeliest = reference_logits(model, ids)[-1].topk(2)
            if likeliest.values[0] - likeliest.values[1] < MIN_GAP:
                break
            ids.append(int(likeliest.indices[0]))
        else:
            found.append((prompt, ids[len(prompt) :]))
    return found


@pytest.mark.slow
async def test_answers_of_a_real_executor_are_exact_through_faults(tmp_path: Path, told: Callable[[str], None]) -> None:
    directory = save_tiny(tmp_path, "llama")
    chance = random.Random(3)
    sure = sure_answers(directory, 40, chance)

    def make() -> Wanted:
        prompt, ids = chance.choice(sure)
        options = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        return Wanted("greedy", prompt, options, [ids])

    flags = ["--model", str(directory), "--dtype", "float32", "--num-blocks", str(NUM_BLOCKS), "--block-size", "4"]
    with cleaned_up([]) as services:
        replicas = Linked(tmp_path, services, [*flags, "--max-rows", "16", "--tokens-per-step", "64"], PATIENT)
        await replicas.start_linked(num_schedulers=2, num_executors=1)
        await replicas.idle_loads(60)
        chaos = Chaos(replicas, chance, pause_s=1.0, spare_schedulers=True, answers_between=8)
        made = await through_chaos(chaos, replicas.target, make, concurrency=16, num_faults=10, end_s=60)
        await assert_every_lease_adds_up(replicas, NUM_BLOCKS)
        await replicas.close()
    told(
        f"chaos, real executor: 10 faults {dict(chaos.counts)}; {len(made)} calls of {ANSWER_TOKENS} tokens, asked "
        f"again {sum(wanted.attempts - 1 for wanted in made)} times; "
        "wrong 0, lost or repeated 0, hung 0, blocks in use 0"
    )
    assert sum(chaos.counts.values()) == 10
    assert chaos.counts["executor killed"] >= 2
    assert len(made) > 40
