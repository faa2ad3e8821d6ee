"""How long requests took and how large they were, counted once at each one's end. Bounds are those of OpenTelemetry's
conventions for generative models."""

import time
from collections import Counter

from scheduler_svc.answer import Answer
from scheduler_svc.histogram import Histogram
from scheduler_svc.samples import Samples

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
WHOLE_S = tuple(0.01 * 2**i for i in range(14))
TOKENS = tuple(4.0**i for i in range(11))
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128)


class RequestTimes:
    """Those of one model. Times of a request that several answers are given to are those of its first."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()  # requests by "stop", "length", "cancelled" or "failed"
        self.prompt_tokens, self.output_tokens, self.max_tokens = (
            Histogram(TOKENS),
            Histogram(TOKENS),
            Histogram(TOKENS),
        )
        self.num_samples = Histogram(SAMPLES)
        self.queue_s, self.prefill_s, self.first_token_s = (Histogram(FIRST_TOKEN_S) for _ in range(3))
        self.decode_s, self.inference_s, self.whole_s = (Histogram(WHOLE_S) for _ in range(3))
        self.mean_token_s = Histogram(TOKEN_S)

    def note_end(self, samples: Samples) -> None:
        """Times are counted of requests that have finished; of others nobody knows what they would have been."""
        now = time.perf_counter()
        first = samples.answers[0]
        self.num_samples.add(len(samples.answers))
        self.prompt_tokens.add(first.sequence.num_prompt)
        if first.sequence.max_tokens is not None:
            self.max_tokens.add(first.sequence.max_tokens)
        if samples.outcome != "finished":
            self.ended[samples.outcome] += 1
            return
        self.ended["length" if first.ended_by_length else "stop"] += 1
        for answer in samples.answers:
            self.output_tokens.add(answer.sequence.num_output)
        self._note_times(first, samples.opened_at, now)

    def _note_times(self, first: Answer, opened_at: float, now: float) -> None:
        self.whole_s.add(now - opened_at)
        admitted_at, token_at = first.admitted_at, first.first_token_at
        if admitted_at is None or token_at is None:
            return
        self.queue_s.add(admitted_at - opened_at)
        self.prefill_s.add(token_at - admitted_at)
        self.first_token_s.add(token_at - opened_at)
        self.decode_s.add(now - token_at)
        self.inference_s.add(now - admitted_at)
        if (num_more := first.sequence.num_output - 1) > 0:
            self.mean_token_s.add((now - token_at) / num_more)
