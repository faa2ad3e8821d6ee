"""An executor in plain dicts and lists: the oracle of the core's tests. It obeys plans and notices broken rules."""

import hashlib

from scheduler_svc.core.plan import Lease, Plan, Result


def next_token(context: list[int], vocab_size: int = 50) -> int:
    """The model: a hash of all tokens so far."""
    return int.from_bytes(hashlib.sha256(repr(context).encode()).digest()[:4], "little") % vocab_size


def continuation(prompt: list[int], end_ids: tuple[int, ...], max_total: int) -> list[int]:
    """What a sequence must come to, whatever else runs."""
    tokens = list(prompt)
    while len(tokens) < max_total:
        tokens.append(next_token(tokens))
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
        for row in plan.ended:
            del self.rows[row]
        for start in plan.started:
            assert start.row not in self.rows
            self.rows[start.row] = {
                "known": list(start.token_ids),
                "computed": start.num_computed,
                "table": list(start.blocks),
                "stretched": 0 < self.rope_switch_len < len(start.token_ids),
            }
        for row, block in zip(plan.appended_rows.tolist(), plan.appended_blocks.tolist(), strict=True):
            self.rows[row]["table"].append(block)
        scheduled = list(zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.samples.tolist(), strict=True))
        assert len({row for row, _, _ in scheduled}) == len(scheduled)
        for row, count, _ in scheduled:
            self._write(self.rows[row], count)
        return Result(plan.step, _int32([self._sample(self.rows[row]) for row, _, samples in scheduled if samples]))

    def _write(self, row: dict, count: int) -> None:
        for position in range(row["computed"], row["computed"] + count):
            self.slots[self._slot(row, position)] = (position, row["stretched"], row["known"][position])
        row["computed"] += count
        if self.rope_switch_len and not row["stretched"]:
            assert row["computed"] <= self.rope_switch_len, "a row outgrows its keys"

    def _sample(self, row: dict) -> int:
        assert row["computed"] == len(row["known"]), "a row samples only when it has caught up"
        context = []
        for position in range(row["computed"]):
            at, stretched, token = self.slots[self._slot(row, position)]
            assert at == position, "a block holds another prefix than its table says"
            assert stretched == row["stretched"], "a block holds keys that were turned for another length"
            context.append(token)
        row["known"].append(next_token(context))
        return row["known"][-1]

    def _slot(self, row: dict, position: int) -> int:
        return row["table"][position // self.block_size] * self.block_size + position % self.block_size


def _int32(values: list[int]):
    import numpy as np

    return np.array(values, np.int32)
