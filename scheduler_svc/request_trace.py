"""What a trace is told of its request, once, at its end."""

import time

from scheduler_svc.samples import Samples
from scheduler_svc.trace import Fact, Trace


def tell_trace(trace: Trace, samples: Samples) -> None:
    """The phases that it came to, the last one as far as it went; of several samples those of the first. Names of facts
    are those of OpenTelemetry's conventions for generative models, where these have one."""
    now, first = time.perf_counter(), samples.answers[0]
    moments = [samples.opened_at]
    moments += [at for at in (first.admitted_at, first.first_token_at) if at is not None]
    for name, begin, end in zip(("queue", "prefill", "decode"), moments, [*moments[1:], now], strict=False):
        trace.note_phase(name, begin, end)
    sequence = first.sequence
    facts: dict[str, Fact] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paged",
        "gen_ai.request.model": samples.model,
        "gen_ai.request.choice.count": len(samples.answers),
        "gen_ai.usage.input_tokens": sequence.num_prompt,
        "gen_ai.usage.cache_read.input_tokens": sequence.num_cached or 0,
        "gen_ai.usage.output_tokens": sum(answer.sequence.num_output for answer in samples.answers),
        "paged.request_id": sequence.request_id,
        "paged.ended": samples.outcome,
    }
    if samples.outcome == "finished":
        facts["gen_ai.response.finish_reasons"] = [
            "length" if answer.ended_by_length else "stop" for answer in samples.answers
        ]
    if sequence.max_tokens is not None:
        facts["gen_ai.request.max_tokens"] = sequence.max_tokens
    trace.describe(facts)
