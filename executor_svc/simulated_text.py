"""What the simulated model says: the next token is a hash of the whole context.

    context = sum over positions p of id[p] * coefficient(p)          (modulo 2^64, coefficients odd)
    h       = mix(context ^ mix(length))                              length counts the tokens of the context
    h       = mix(h ^ mix(seed + GOLDEN * (index + 1)))               only when temperature > 0
    token   = h mod vocabulary size

An id changed at one position always changes `context`, because an odd number times a difference below 2^64 is never 0.
While a row has fewer output tokens than min_tokens, end tokens are passed over: the next id up, wrapping around.

Log-probabilities are as arbitrary, and as exact: with u = (h >> 48) / 65536 the j-th most likely token (j from 1) is
(token + j - 1) mod vocabulary size at -(j - 1 + u), the drawn one being the first.

The same functions serve the runner (arrays over rows) and tests or benchmarks (one sequence, without any blocks).
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s

UInt64s = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: UInt64s) -> UInt64s:
    """Spread every input bit over all output bits (the finalizer of splitmix64; Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def coefficients(num_positions: int) -> UInt64s:
    """One odd number for each position from 0 on."""
    return mix(np.arange(1, num_positions + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


def length_keys(longest: int) -> UInt64s:
    """mix(length) for each length from 0 to longest."""
    return mix(np.arange(longest + 1, dtype=np.uint64))


def draw_keys(seeds: UInt64s, indices: UInt64s) -> UInt64s:
    """What a row with a temperature contributes to its hashes."""
    return mix(seeds + _GOLDEN * (indices + np.uint64(1)))


def pass_over(token: int, end_token_ids: Collection[int], vocab_size: int) -> int:
    """The first id from `token` up that does not end a text; `token` itself where all of them do."""
    for step in range(vocab_size):
        candidate = (token + step) % vocab_size
        if candidate not in end_token_ids:
            return candidate
    return token


def token_logprobs(token: int, context_hash: int, num_alternatives: int, vocab_size: int) -> tuple[Int32s, list[float]]:
    """Ids and values of the drawn token and then the most likely ones: num_alternatives + 1 entries."""
    u = (context_hash >> 48) / 65536
    ranks = [0, *range(num_alternatives)]
    ids = (token + np.array(ranks, np.int64)) % vocab_size
    return ids.astype(np.int32), [-(rank + u) for rank in ranks]


class SimulatedText:
    """One sequence of the simulated model, token by token, without blocks: the oracle of what a request must say.

    Give the prompt and the parameters that shape the draw; then `next_token()` extends `token_ids`.
    `reply` are the ids that a script makes the model say first.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        temperature: float = 0.0,
        seed: int = 0,
        index: int = 0,
        min_tokens: int = 0,
        end_token_ids: Collection[int] = (),
        reply: Sequence[int] = (),
    ) -> None:
        self.token_ids = list(prompt_ids)
        self._num_prompt = len(prompt_ids)
        self._vocab_size = vocab_size
        self._min_tokens = min_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._reply = reply
        key = draw_keys(np.array([seed], np.uint64), np.array([index], np.uint64))
        self._key = key if temperature > 0 else None
        self._coefficients = coefficients(max(64, 2 * len(prompt_ids)))
        ids = np.array(self.token_ids, np.uint64)
        self._context = ids @ self._coefficients[: len(ids)] if len(ids) else np.uint64(0)

    def context_hash(self) -> int:
        """The hash `h` that the next token comes from."""
        length = np.array([len(self.token_ids)], np.uint64)
        h = mix(np.array([self._context], np.uint64) ^ mix(length))
        return int((h if self._key is None else mix(h ^ self._key))[0])

    def next_token(self) -> int:
        num_output = len(self.token_ids) - self._num_prompt
        token = self.context_hash() % self._vocab_size
        if num_output < self._min_tokens:
            token = pass_over(token, self._end_token_ids, self._vocab_size)
        if num_output < len(self._reply):
            token = self._reply[num_output]
        self._append(token)
        return token

    def _append(self, token: int) -> None:
        position = len(self.token_ids)
        if position >= len(self._coefficients):
            self._coefficients = coefficients(2 * position)
        added = np.array([token], np.uint64) * self._coefficients[position : position + 1]
        self._context = (np.array([self._context], np.uint64) + added)[0]  # arrays wrap around without a warning
        self.token_ids.append(token)


def simulated_continuation(
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int,
    temperature: float = 0.0,
    seed: int = 0,
    index: int = 0,
    min_tokens: int = 0,
    end_token_ids: Collection[int] = (),
    reply: Sequence[int] = (),
) -> list[int]:
    """The output ids of a request: max_tokens of them, or up to and including the first end token."""
    text = SimulatedText(
        prompt_ids,
        vocab_size=vocab_size,
        temperature=temperature,
        seed=seed,
        index=index,
        min_tokens=min_tokens,
        end_token_ids=end_token_ids,
        reply=reply,
    )
    for _ in range(max_tokens):
        if text.next_token() in end_token_ids:
            break
    return text.token_ids[len(prompt_ids) :]
