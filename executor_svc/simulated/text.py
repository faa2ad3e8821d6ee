"""What the simulated model says: the next token is a hash of the whole context.

    context = sum over positions p of (id[p] + 1) * R^p               (modulo 2^64)
    h       = mix(context)
    h       = mix(h ^ mix(seed + R * (index + 1)))                    only when temperature > 0
    token   = (h >> 32) mod vocabulary size

R is odd, so an id that is changed, added or left out at one position always changes `context`: an odd number times a
difference below 2^64 is never 0. While a row has fewer output tokens than min_tokens, end tokens are passed over: the
next id up, wrapping around. So is what the row's rules, or its mask, forbid. A bias competes with distance: the logit
of the id that is d steps up, wrapping around, is -d.

Log-probabilities are as arbitrary, and as exact: with u = (h >> 48) / 65536 the j-th most likely token (j from 1) is
(token + j - 1) mod vocabulary size at -(j - 1 + u), the drawn one being the first. A prompt's own tokens are
measured in the same way against what `h` without seed and index makes the most likely.

The runner computes this for arrays of rows; `SimulatedText` for one sequence, in plain integers and without blocks.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s
from executor_svc.token_rules import NO_RULES, TokenRules

UInt64s = NDArray[np.uint64]

R = 0x9E3779B97F4A7C15  # 5 modulo 8: no odd number has more different powers modulo 2^64
_WORD = (1 << 64) - 1
_MIXER, _HALF = np.uint64(0xBF58476D1CE4E5B9), np.uint64(32)


def mix(values: UInt64s) -> UInt64s:
    """Let every input bit count in the upper half, one to one: an odd factor spreads them upwards."""
    return values * _MIXER


def tokens_of(hashes: UInt64s, vocab_size: int) -> Int32s:
    """The token that each hash stands for."""
    return ((hashes >> _HALF) % np.uint64(vocab_size)).astype(np.int32)


def powers(count: int, stride: int = 1) -> UInt64s:
    """R^0, R^stride, R^(2 * stride), ...: [count]."""
    factors = np.full(count, pow(R, stride, 1 << 64), np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)


def draw_keys(seeds: UInt64s, indices: UInt64s) -> UInt64s:
    """What a row with a temperature contributes to its hashes."""
    return mix(seeds + np.uint64(R) * (indices + np.uint64(1)))


def mix_one(value: int) -> int:
    """`mix` of one integer."""
    return value * int(_MIXER) & _WORD


def pass_over(token: int, end_token_ids: Collection[int], vocab_size: int) -> int:
    """The first id from `token` up that does not end a text; `token` itself where all of them do."""
    for step in range(vocab_size):
        candidate = (token + step) % vocab_size
        if candidate not in end_token_ids:
            return candidate
    return token


def choose(
    token: int,
    rules: TokenRules,
    last_ids: Sequence[int],
    passed_over: Collection[int],
    vocab_size: int,
    mask: NDArray[np.integer] | None = None,
) -> int:
    """The most likely id where `token` would be it without rules; -1 where none is left. `last_ids` are those before
    it, as many as a rule may look at; `mask` has the ids that a mask allows."""
    logits = -np.arange(vocab_size, dtype=np.float64)  # of `token`, and then of each id up from it
    logits[(rules.bias_ids - token) % vocab_size] += rules.biases
    for allowed in (rules.allowed_ids if len(rules.allowed_ids) else None, mask):
        if allowed is not None:
            forbidden = np.ones(vocab_size, np.bool_)
            forbidden[allowed] = False
            logits[(np.flatnonzero(forbidden) - token) % vocab_size] = -np.inf
    for sequence in rules.banned:
        *begin, last = sequence.tolist()
        if list(last_ids[len(last_ids) - len(begin) :]) == begin:
            logits[(last - token) % vocab_size] = -np.inf
    for token_id in passed_over:
        logits[(token_id - token) % vocab_size] = -np.inf
    best = int(logits.argmax())
    return (token + best) % vocab_size if np.isfinite(logits[best]) else -1


def token_logprobs(token: int, context_hash: int, num_alternatives: int, vocab_size: int) -> tuple[Int32s, list[float]]:
    """Ids and values of the drawn token and then the most likely ones: num_alternatives + 1 entries."""
    u = (context_hash >> 48) / 65536
    ranks = [0, *range(num_alternatives)]
    ids = (token + np.array(ranks, np.int64)) % vocab_size
    return ids.astype(np.int32), [-(rank + u) for rank in ranks]


def score(target: int, context_hash: int, num_alternatives: int, vocab_size: int) -> tuple[Int32s, list[float], int]:
    """Of a prompt's token after a context, without a draw: ids and values as `token_logprobs`, and its rank."""
    best = (context_hash >> 32) % vocab_size
    ids, values = token_logprobs(best, context_hash, num_alternatives, vocab_size)
    distance = (target - best) % vocab_size
    ids[0], values[0] = target, values[0] - distance
    return ids, values, distance + 1


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
        rules: TokenRules = NO_RULES,
    ) -> None:
        self.token_ids = list(prompt_ids)
        self._num_prompt = len(prompt_ids)
        self._vocab_size = vocab_size
        self._min_tokens = min_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._reply = reply
        self._rules = rules
        self._key = mix_one(seed + R * (index + 1) & _WORD) if temperature > 0 else None
        self._context = 0
        self._power = 1
        for token in self.token_ids:
            self._add(token)

    def context_hash(self) -> int:
        """The hash `h` that the next token comes from."""
        h = mix_one(self._context)
        return h if self._key is None else mix_one(h ^ self._key)

    def next_token(self, mask: NDArray[np.integer] | None = None) -> int:
        """`mask` has the ids that a mask allows."""
        num_output = len(self.token_ids) - self._num_prompt
        token = (self.context_hash() >> 32) % self._vocab_size
        held = self._end_token_ids if num_output < self._min_tokens else ()
        if self._rules is not NO_RULES or mask is not None:
            token = choose(token, self._rules, self.token_ids, held, self._vocab_size, mask)
        elif held:
            token = pass_over(token, held, self._vocab_size)
        if num_output < len(self._reply):
            token = self._reply[num_output]
        self._add(token)
        self.token_ids.append(token)
        return token

    def _add(self, token: int) -> None:
        self._context = (self._context + (token + 1) * self._power) & _WORD
        self._power = self._power * R & _WORD


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
    rules: TokenRules = NO_RULES,
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
        rules=rules,
    )
    for _ in range(max_tokens):
        if text.next_token() in end_token_ids:
            break
    return text.token_ids[len(prompt_ids) :]
