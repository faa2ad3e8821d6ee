"""Which answers may be what takes the executor down, and what becomes of them."""

from dataclasses import dataclass

from scheduler_svc.answer import Answer
from scheduler_svc.core.sequence import Sequence

LOSSES_TOGETHER = 2  # after which what ran is computed alone, one after the other
UNTOLD_FOR_ONE = 4  # losses of which nobody has said whose step it was weigh as one


@dataclass(slots=True)
class _Losses:
    """Of the executor, while an answer was computed, with no token since."""

    together: int = 0
    alone: int = 0
    untold: int = 0  # while its exclusive plan was awaited, and was not announced


class Suspects:
    """Whatever ran at a loss is suspected, until it gets a token. A suspect of two losses is computed alone, in
    steps of which other schedulers have no part either; one over which the executor is lost even then, `max_losses`
    times, is convicted.

    Where the step was not announced it may have been another scheduler's, whose request costs a few losses at most. So
    one that is there at many more of these is convicted, too: an executor may be one that announces nothing, or be gone
    before its word is.
    """

    def __init__(self, max_losses: int) -> None:
        self._max_losses = max_losses
        self._losses: dict[Answer, _Losses] = {}

    def note_loss(self, ran: list[Sequence], *, alone: bool) -> list[Answer]:
        """The executor was lost while these ran; `alone`: in the step of an exclusive plan. Returns those that are
        convicted, and forgotten."""
        suspects = [sequence for sequence in ran if sequence.alone]
        convicted = []
        for sequence in suspects or ran:
            losses = self._losses.setdefault(sequence.owner, _Losses())
            if not sequence.alone:
                losses.together += 1
            elif alone:
                losses.alone += 1
            else:
                losses.untold += 1
            sequence.alone = losses.together >= LOSSES_TOGETHER
            if losses.alone + losses.untold // UNTOLD_FOR_ONE >= self._max_losses:
                convicted.append(sequence.owner)
                self.forget(sequence.owner)
        return convicted

    def note_tokens(self, updated: list[Sequence]) -> None:
        """These have got a token."""
        if self._losses:
            for answer in self._losses.keys() & {sequence.owner for sequence in updated}:
                answer.sequence.alone = False
                self.forget(answer)

    def forget(self, answer: Answer) -> None:
        self._losses.pop(answer, None)
