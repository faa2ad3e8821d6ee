"""Makes beam searches for tests of the core."""

from scheduler_svc.core.beam import BeamParameters, BeamSearch, EarlyStopping
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.sequence import Sampling, Sequence

EARLY = {False: EarlyStopping.NO, True: EarlyStopping.YES, "never": EarlyStopping.NEVER}


def beams_of(
    prompt: list[int],
    width: int,
    max_tokens: int | None = 6,
    *,
    returned: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    end_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    place: dict | None = None,
) -> list[Sequence]:
    """The sequences that are given the answers; the first is the one to submit."""
    answers = [
        Sequence("b", list(prompt), max_tokens, Sampling(temperature=0, index=index, logprobs=1), **(place or {}))
        for index in range(returned or width)
    ]
    parameters = BeamParameters(width, length_penalty, EARLY[early_stopping], end_ids, min_tokens, num_told=1)
    answers[0].group = BeamGroup(answers, BeamSearch(parameters))
    return answers
