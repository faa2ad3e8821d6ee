"""How the beams of a waiting group would start: which of them begin in whole blocks of an earlier one."""

from dataclasses import dataclass
from itertools import count

from scheduler_svc.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BeamStart:
    """`likes` has, for each beam but the first, the index of an earlier one and how many whole blocks of its own table
    are that one's. Holds while the group waits; made once, for it takes a look at all tokens of all beams."""

    beams: list[Sequence]
    likes: list[tuple[int, int]]
    block_size: int
    num_blocks: int  # of each beam's table

    @classmethod
    def of(cls, beams: list[Sequence], num_prompt: int, block_size: int) -> "BeamStart":
        """`beams` are equally long, at least one token longer than their common prompt if there are several.

        At least two positions are left to compute: a row that lacks several is computed only once all before it have
        caught up, so what it finds in its blocks is there.
        """
        num_tokens = len(beams[0].token_ids)
        num_common = num_prompt // block_size
        ends = range((num_common + 1) * block_size, num_tokens - 1, block_size)  # of whole blocks with output
        numbers = count(1)
        first_with: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # number of a beginning, and whose it is
        likes = []
        for index, beam in enumerate(beams):
            beginning, like = 0, (0, min(num_common, (num_tokens - 2) // block_size))
            for end in ends:
                block = (beginning, tuple(beam.token_ids[end - block_size : end]))
                if block not in first_with:
                    first_with[block] = (next(numbers), index)
                beginning, whose = first_with[block]
                if whose != index:
                    like = (whose, end // block_size)
            likes.append(like)
        return cls(beams, likes[1:], block_size, -(-num_tokens // block_size))

    @property
    def most_blocks(self) -> int:
        """Blocks that all of them take, if nothing is cached."""
        return self.num_blocks + sum(self.num_blocks - num_shared for _, num_shared in self.likes)
