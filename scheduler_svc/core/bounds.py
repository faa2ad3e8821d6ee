"""How long a sequence may become under a lease: as its max_tokens, the model and the memory allow."""

from scheduler_svc.core.plan import Lease
from scheduler_svc.core.sequence import Sequence


def model_len(lease: Lease, longest: int | None) -> int:
    """Most tokens of a sequence, whatever memory there is. `longest` bounds it where the model allows more."""
    return min(lease.max_model_len, longest or lease.max_model_len)


def capacity_of(sequence: Sequence, lease: Lease) -> int:
    """Most tokens of the sequence, or each beam of its group, in all that the executor lends; 0 if that lacks rows."""
    if sequence.group is None:
        return lease.most.blocks * lease.block_size + 1  # the last one needs no slot
    enough = sequence.group.parameters.width <= lease.most.rows
    return sequence.group.capacity_tokens(lease.most.blocks, lease.block_size) if enough else 0


def length_of(sequence: Sequence, lease: Lease, longest: int | None) -> int:
    """Most tokens that it asks for and the model allows; where max_tokens is open, no more than memory can hold."""
    if sequence.max_tokens is None:
        return min(model_len(lease, longest), capacity_of(sequence, lease))
    return min(model_len(lease, longest), sequence.num_prompt + sequence.max_tokens)


def reach(sequence: Sequence, lease: Lease, longest: int | None) -> int:
    """Most tokens, prompt included, that the sequence may come to have; 0 if it can never be computed."""
    known = len(sequence.token_ids) if sequence.group is None else sequence.group.num_tokens
    length = length_of(sequence, lease, longest)
    return length if known < length <= capacity_of(sequence, lease) else 0
