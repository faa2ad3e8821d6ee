"""What the engines are asked for: R64, requests of many lengths; and P64, as many behind one long prefix."""

import random
from dataclasses import dataclass

NUM_REQUESTS = 64
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 512), (32, 256)
IDS = (10, 149_990)
PREFIX_TOKENS, OWN_TOKENS, P64_OUTPUT_TOKENS = 1024, 64, 128
_PREFIX_SEED, _WARM_SEED = 1, 2
_WARM_OUTPUT_TOKENS = 8
REST_S = 10.0  # of every engine between its warm-up and its run


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of ids, continued greedily by exactly `max_tokens`; end tokens are ordinary ones."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at the beginning, and all run at once.

    `prefix` begins every prompt and is in the prefix cache already; without one there is no prefix caching. `warm_up`
    is what an engine computes first, untimed; none of it occurs in `requests`, but for the prefix.
    """

    name: str
    requests: list[Request]
    warm_up: list[Request]
    prefix: list[int]

    @property
    def tokens_in(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def tokens_out(self) -> int:
        return sum(request.max_tokens for request in self.requests)


def r64() -> Workload:
    """Lengths and ids drawn one after another, request by request."""
    drawn = random.Random(0)
    requests = []
    for _ in range(NUM_REQUESTS):
        num_prompt, num_output = drawn.randint(*PROMPT_TOKENS), drawn.randint(*OUTPUT_TOKENS)
        requests.append(Request(_ids(drawn, num_prompt), num_output))
    return Workload("R64", requests, _warm_up([]), [])


def p64() -> Workload:
    """The beginnings of R64's prompts behind a common prefix. A prompt that is shorter than that is taken whole."""
    prefix = _ids(random.Random(_PREFIX_SEED), PREFIX_TOKENS)
    requests = [Request(prefix + request.prompt[:OWN_TOKENS], P64_OUTPUT_TOKENS) for request in r64().requests]
    return Workload("P64", requests, _warm_up(prefix), prefix)


def _warm_up(prefix: list[int]) -> list[Request]:
    drawn = random.Random(_WARM_SEED)
    others = [Request(prefix + _ids(drawn, OWN_TOKENS), _WARM_OUTPUT_TOKENS) for _ in range(NUM_REQUESTS)]
    # Alone and first: those that come with it would compute the prefix once more.
    return others if not prefix else [Request([*prefix, IDS[0]], 1), *others]


def _ids(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randint(*IDS) for _ in range(count)]
