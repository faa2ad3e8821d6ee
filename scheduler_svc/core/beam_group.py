"""A beam search as the scheduler runs it: one sequence for each beam, and one that stands for all of them."""

from dataclasses import dataclass, field

from scheduler_svc.core.beam import BeamParameters, BeamSearch, outputs_of
from scheduler_svc.core.beam_start import BeamStart
from scheduler_svc.core.sequence import EndReason, Sampling, Sequence, State, TokenLogprobs, writable

MAX_IDS = 1 << 22  # of all beams together: an executor takes no larger plan than its max_message_bytes


@dataclass(slots=True, eq=False)
class BeamGroup:
    """`answers` are the sequences in which the best answers are given, at the end; the first of them stands for the
    group: it waits in the queue, and is running while the beams are. `beams` are those that have rows, best first.

    All beams are equally long. The first token is looked for in one row; the others are kept free meanwhile.
    """

    answers: list[Sequence]
    search: BeamSearch
    beams: list[Sequence] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # of beams to come: row and tenancy
    waiting: BeamStart | None = None  # of beams that wait, once it was asked for
    drawn: dict[Sequence, tuple[int, TokenLogprobs]] = field(default_factory=dict)  # by beams that have caught up

    @property
    def handle(self) -> Sequence:
        return self.answers[0]

    @property
    def parameters(self) -> BeamParameters:
        return self.search.parameters

    @property
    def num_tokens(self) -> int:
        """Known of each beam, prompt included."""
        return self.handle.num_prompt + self.search.num_tokens

    @property
    def num_to_start(self) -> int:
        return len(self.search.beams)

    @property
    def max_tokens(self) -> int:
        """Of output, under the largest lease."""
        return self.handle.max_total - self.handle.num_prompt

    def capacity_tokens(self, num_blocks: int, block_size: int) -> int:
        """The longest that beams may become in so many blocks, prompt included, even if they share no block of output.

        The last token needs no slot. Beams that start anew share all blocks before the one of the prompt's last token,
        but the plan that starts them names all ids of each.
        """
        width, num_shared = self.parameters.width, (self.handle.num_prompt - 1) // block_size
        in_blocks = (num_shared + max(num_blocks - num_shared, 0) // width) * block_size + 1
        return min(in_blocks, MAX_IDS // width)

    def growth(self, block_size: int) -> int:
        """Most blocks that the beams, once they run, can need after their next token, besides those that dropped ones
        give back."""
        if self.num_tokens + 1 >= self.handle.max_total:
            return 0
        return self.parameters.width - (self.num_to_start if self.num_tokens % block_size else 0)

    def new_beam(self, token_ids: list[int]) -> Sequence:
        handle = self.handle
        beam = Sequence(
            request_id=handle.request_id,
            token_ids=token_ids,
            sampling=Sampling(temperature=0, logprobs=self.parameters.num_candidates),
            cache_salt=handle.cache_salt,
            bypass_cache=handle.bypass_cache,
            priority=handle.priority,
            num_prompt=handle.num_prompt,
            stretched=handle.stretched,
            rank=handle.rank,
            group=self,
        )
        beam.state = State.RUNNING
        return beam

    def start(self, block_size: int) -> BeamStart:
        """Of all beams as they are known, best first."""
        if self.waiting is None or self.waiting.block_size != block_size:
            prompt = self.handle.token_ids
            outputs = [[node.token for node in outputs_of(beam.last)] for beam in self.search.beams]
            beams = [self.new_beam(prompt + output) for output in outputs]
            for beam in beams:
                beam.block_hashes = self.handle.block_hashes.copy()  # of the prompt
            self.waiting = BeamStart.of(beams, self.handle.num_prompt, block_size)
        return self.waiting

    def finish(self) -> list[Sequence]:
        """Give the answers to their sequences. Returns these."""
        ends = self.parameters.end_token_ids
        for sequence, answer in zip(self.answers, self.search.answers, strict=False):
            nodes = outputs_of(answer.last)
            output = [node.token for node in nodes]
            sequence.token_ids = sequence.token_ids + output  # the prompt's list is others', too
            sequence.score = answer.score
            sequence.end_reason = EndReason.END_TOKEN if nodes[-1].token in ends else EndReason.LENGTH
            sequence.num_cached = self.handle.num_cached
            if self.handle.sampling.logprobs is not None:
                writable(sequence.logprobs).extend(node.logprobs for node in nodes)
        return self.answers

    def fail(self, reason: EndReason) -> list[Sequence]:
        """No answer can be given. Returns the sequences that have ended."""
        for sequence in self.answers:
            sequence.end_reason = reason
        return self.answers
