"""What is added to a row's logits whatever it has drawn: biases, and minus infinity for what it may never draw."""

import numpy as np
import torch

from executor_svc.model.places import Places
from executor_svc.model.staging import Column, Staging
from executor_svc.token_rules import TokenRules


class AddedLogits:
    """A float32 table `[places, vocab]`, with a place for each set of rules that a live row has: the samples of one
    request share theirs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._staging = Staging(device)
        self._table = torch.zeros(0, vocab_size, device=device)
        self._places = Places()
        self._place_of: dict[bytes, int] = {}
        self._users: dict[int, tuple[bytes, int]] = {}  # by place: its rules, and how many rows have them

    def start(self, rules: TokenRules) -> int:
        """Returns the place that the row shall name."""
        banned = [sequence for sequence in rules.banned if len(sequence) == 1]
        columns: dict[str, Column] = {
            "allowed": rules.allowed_ids.astype(np.int64),
            "biased": rules.bias_ids.astype(np.int64),
            "biases": rules.biases.astype(np.float32),
            "banned": np.concatenate(banned).astype(np.int64) if banned else np.empty(0, np.int64),
        }
        key = b"".join(len(column).to_bytes(4, "little") + column.tobytes() for column in columns.values())
        place = self._place_of.get(key)
        if place is None:
            place = self._place_of[key] = self._fill({name: c for name, c in columns.items() if len(c)})
        self._users[place] = key, self._users.get(place, (key, 0))[1] + 1
        return place

    def end(self, place: int) -> None:
        """One row fewer has these rules."""
        key, num_users = self._users.pop(place)
        if num_users > 1:
            self._users[place] = key, num_users - 1
        else:
            del self._place_of[key]
            self._places.give_back(place)

    def clear(self) -> None:
        self._place_of.clear()
        self._users.clear()
        self._places.clear()

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Add, in place, to `rows` of float32 logits `[num_rows, vocab]`; int64 `[num_ruled]` each."""
        logits.index_add_(0, rows, self._table.index_select(0, places))

    def _fill(self, columns: dict[str, Column]) -> int:
        place = self._places.take()
        if place >= len(self._table):
            self._table = torch.cat(
                [self._table, self._table.new_zeros(max(4, len(self._table)), self._table.shape[1])]
            )
        row = self._table[place].fill_(-torch.inf if "allowed" in columns else 0.0)
        on_device = self._staging.to_device(columns)
        if "allowed" in columns:
            row.index_fill_(0, on_device["allowed"], 0.0)
        if "biased" in columns:
            row.index_add_(0, on_device["biased"], on_device["biases"])
        if "banned" in columns:
            row.index_fill_(0, on_device["banned"], -torch.inf)
        return place
