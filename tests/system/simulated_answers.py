"""What the simulated model, with a small vocabulary, must answer where answers are chosen among several."""

from executor_svc.simulated.text import R, SimulatedText, mix_one, token_logprobs
from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.core.sequence import TokenLogprobs
from scheduler_svc.requests import GenerationRequest
from tests.core.beam_oracle import beam_answers

VOCAB_SIZE = 300
END_IDS = tuple(range(0, VOCAB_SIZE, 12))  # for answers that end early
EARLY = {EarlyStopping.NO: False, EarlyStopping.YES: True, EarlyStopping.NEVER: "never"}
Answers = list[tuple[list[int], float | None]]  # ids and score of each, the best first


def likely_tokens(context: list[int], _: int, count: int) -> TokenLogprobs:
    """What the simulated model says of a context, most likely first."""
    mixed = mix_one(sum((token + 1) * pow(R, i, 1 << 64) for i, token in enumerate(context)) % (1 << 64))
    token = (mixed >> 32) % VOCAB_SIZE
    ids, values = token_logprobs(token, mixed, min(count, VOCAB_SIZE), VOCAB_SIZE)
    return TokenLogprobs(values[0], 1, ids[1:].tolist(), values[1:])


def right_answers(request: GenerationRequest) -> Answers:
    """Of any request without rules and grammar; it must have `max_tokens` and ignore the model's own end tokens."""
    if (beam := request.beam) is not None:
        found = beam_answers(
            request.prompt_ids,
            beam.width,
            request.max_tokens or 0,
            length_penalty=beam.length_penalty,
            early_stopping=EARLY[beam.early_stopping],
            end_ids=request.stop_token_ids,
            likely=likely_tokens,
        )
        return [(ids, score) for ids, score in found[: request.num_samples]]
    samples = [_sample(request, index) for index in range(request.best_of or request.num_samples)]
    if request.best_of is None:
        return [(ids, None) for ids, _ in samples]
    best = sorted(samples, key=lambda sample: -sample[1])
    return [(ids, total) for ids, total in best[: request.num_samples]]


def _sample(request: GenerationRequest, index: int) -> tuple[list[int], float]:
    """Ids and the sum of their log-probabilities."""
    sampling, total = request.sampling, 0.0
    text = SimulatedText(
        request.prompt_ids,
        vocab_size=VOCAB_SIZE,
        temperature=sampling.temperature,
        seed=sampling.seed,
        index=index,
    )
    for _ in range(request.max_tokens or 0):
        total -= (text.context_hash() >> 48) / 65536
        if text.next_token() in request.stop_token_ids:
            break
    return text.token_ids[len(request.prompt_ids) :], total
