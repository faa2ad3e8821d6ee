"""An executor in plain dicts and lists: the oracle of the core's tests. It obeys plans and notices broken rules."""

import hashlib
from array import array
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, cycle, islice

from scheduler_svc.core.plan import Copies, Lease, Plan, Result, Returned
from scheduler_svc.core.sequence import TokenLogprobs

VOCAB_SIZE = 50


def _hash(context: list[int], index: int) -> bytes:
    return hashlib.sha256(array("q", [*context, index]).tobytes()).digest()


def next_token(context: list[int], index: int, allowed: list[int] | None = None) -> int:
    """The model: a hash of all tokens so far, and of the sample's index; the next allowed id from there on."""
    token = int.from_bytes(_hash(context, index)[:4], "little") % VOCAB_SIZE
    if allowed is not None:
        token = min(allowed, key=lambda candidate: (candidate - token) % VOCAB_SIZE)
    return token


def packed(allowed: list[int]) -> bytes:
    """A mask as a plan has it."""
    return sum(1 << token for token in allowed).to_bytes(8, "little")


def unpacked(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(VOCAB_SIZE) if bits >> token & 1]


# What the tokens after an output may be; empty where there are none.
Rule = Callable[[list[int]], list[int]]


def likely_tokens(context: list[int], index: int, count: int) -> TokenLogprobs:
    """The token of `next_token` is the most likely one; log-probabilities are fractions of 64, so sums are exact."""
    token, count = next_token(context, index), min(count, VOCAB_SIZE)
    gaps = islice(cycle(_hash(context, index)[4:]), count)
    values = [-total / 64 for total in accumulate(gap % 96 + 1 for gap in gaps)]
    return TokenLogprobs(values[0] if count else 0, 1, [(token + 7 * i) % VOCAB_SIZE for i in range(count)], values)


def prompt_score(context: list[int], target: int) -> TokenLogprobs:
    """What the model makes of a prompt's token after those before it."""
    return TokenLogprobs(-float(next_token(context, target)), 1 + target, [], [])


@lru_cache(maxsize=1000)
def prompt_scores(prompt: tuple[int, ...]) -> list[TokenLogprobs]:
    """Of all its tokens but the first."""
    return [prompt_score(list(prompt[:i]), prompt[i]) for i in range(1, len(prompt))]


def continuation(
    prompt: list[int], end_ids: tuple[int, ...], max_total: int, index: int = 0, rule: Rule | None = None
) -> list[int]:
    """What a sequence must come to, whatever else runs."""
    return list(_continuation(tuple(prompt), end_ids, max_total, index, rule))


@lru_cache(maxsize=1000)  # asked for again after every operation
def _continuation(
    prompt: tuple[int, ...], end_ids: tuple[int, ...], max_total: int, index: int, rule: Rule | None
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_total:
        allowed = rule(tokens[len(prompt) :]) if rule else None
        if allowed == []:
            break
        tokens.append(next_token(tokens, index, allowed))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


class PlainExecutor:
    """KV memory is a dict from slot to (position, kind of key, token): reading a slot that holds another position, or a
    key of the other kind, is an error."""

    def __init__(self, lease: Lease) -> None:
        self.block_size = lease.block_size
        self.rope_switch_len = lease.rope_switch_len
        self.slots: dict[int, tuple[int, bool, int]] = {}
        self.rows: dict[int, dict] = {}
        self.step = 0

    def run(self, plan: Plan) -> Result:
        self.step += 1
        assert plan.step == self.step
        before = {fork.parent: self.rows[fork.parent] for fork in plan.forks}
        for fork in plan.forks:
            assert fork.is_fresh == (fork.row not in self.rows)
            parent = before[fork.parent]
            assert parent["computed"] == len(parent["known"]) - 1, "a token is replaced after it was computed"
            known = [*parent["known"][:-1], fork.token]
            own = {"known": known, "table": list(parent["table"]), "sampling": fork.sampling}
            self.rows[fork.row] = {**parent, **own}
        for row in plan.ended:
            del self.rows[row]
        for start in plan.started:
            assert start.row not in self.rows
            self.rows[start.row] = {
                "known": list(start.token_ids),
                "computed": start.num_computed,
                "table": list(start.blocks),
                "sampling": start.sampling,
                "scored": start.num_prompt - 1 if start.sampling.prompt_logprobs is not None else 0,
                "stretched": 0 < self.rope_switch_len < len(start.token_ids),
            }
        for joined in plan.joined:
            assert joined.row not in self.rows
            like = self.rows[joined.like]
            assert joined.sampling.prompt_logprobs is None
            own = {"known": list(like["known"]), "table": list(like["table"]), "sampling": joined.sampling}
            own["scored"] = 0
            self.rows[joined.row] = {**like, **own}
        for row, block in zip(plan.appended_rows.tolist(), plan.appended_blocks.tolist(), strict=True):
            self.rows[row]["table"].append(block)
        self._copy(plan.copies)
        scheduled = list(zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.samples.tolist(), strict=True))
        assert len({row for row, _, _ in scheduled}) == len(scheduled)
        likes = {joined.row: joined.like for joined in plan.joined}
        assert [row for row, count, _ in scheduled if count == 0] == [joined.row for joined in plan.joined]
        computing = -1
        prompts = []
        for row, count, _ in scheduled:
            if count:
                self._write(self.rows[row], count)
                if scores := self._scores(self.rows[row], count):
                    prompts.append(scores)
                computing = row
            else:
                assert likes[row] == computing, "a joined row is not behind the one that it is like"
                self.rows[row]["computed"] = self.rows[computing]["computed"]
        self._give_back(plan.returned)
        masks = dict(zip(plan.masks.rows, map(unpacked, plan.masks.masks), strict=True))
        sampling = [row for row, _, samples in scheduled if samples]
        assert masks.keys() <= set(sampling), "a mask for a row that draws nothing"
        logprobs = [self._logprobs(self.rows[row]) for row in sampling]
        tokens = _int32([self._sample(self.rows[row], masks.get(row)) for row in sampling])
        return Result(plan.step, tokens, logprobs if any(logprobs) else None, prompts)

    def _give_back(self, returned: Returned) -> None:
        """Others write into what is returned."""
        assert not self.rows.keys() & set(returned.rows), "a row is returned and live"
        used = {block for row in self.rows.values() for block in row["table"]}
        assert not used & set(returned.blocks), "a block is returned and in a table"
        for block in returned.blocks:
            for offset in range(self.block_size):
                self.slots.pop(block * self.block_size + offset, None)

    def _logprobs(self, row: dict) -> TokenLogprobs | None:
        wanted, index = row["sampling"].logprobs, row["sampling"].index
        return None if wanted is None else likely_tokens(row["known"], index, wanted)

    def _copy(self, copies: Copies) -> None:
        before = dict(self.slots)
        assert not set(copies.sources) & set(copies.destinations)
        for row, source, destination in zip(copies.rows, copies.sources, copies.destinations, strict=True):
            table = self.rows[row]["table"]
            table[table.index(source)] = destination
            for offset in range(self.block_size):
                self.slots.pop(destination * self.block_size + offset, None)
                if (held := before.get(source * self.block_size + offset)) is not None:
                    self.slots[destination * self.block_size + offset] = held

    def _write(self, row: dict, count: int) -> None:
        for position in range(row["computed"], row["computed"] + count):
            self.slots[self._slot(row, position)] = (position, row["stretched"], row["known"][position])
        row["computed"] += count
        if self.rope_switch_len and not row["stretched"]:
            assert row["computed"] <= self.rope_switch_len, "a row outgrows its keys"

    def _scores(self, row: dict, count: int) -> list[TokenLogprobs]:
        """Of the prompt's tokens that follow one of the `count` positions just computed."""
        end = min(row["computed"], row["scored"])
        positions = range(row["computed"] - count, end)
        return [prompt_score(self._context(row, p + 1), row["known"][p + 1]) for p in positions]

    def _sample(self, row: dict, allowed: list[int] | None) -> int:
        assert row["computed"] == len(row["known"]), "a row samples only when it has caught up"
        row["known"].append(next_token(self._context(row, row["computed"]), row["sampling"].index, allowed))
        return row["known"][-1]

    def _context(self, row: dict, length: int) -> list[int]:
        """Its tokens, as its blocks hold them."""
        size = self.block_size
        slots = [block * size + offset for block in row["table"] for offset in range(size)][:length]
        held = [self.slots[slot] for slot in slots]
        assert [at for at, _, _ in held] == list(range(length)), "a block holds another prefix than its table says"
        stretched = {kind for _, kind, _ in held}
        assert stretched <= {row["stretched"]}, "a block holds keys that were turned for another length"
        return [token for _, _, token in held]

    def _slot(self, row: dict, position: int) -> int:
        return row["table"][position // self.block_size] * self.block_size + position % self.block_size


def _int32(values: list[int]):
    import numpy as np

    return np.array(values, np.int32)
