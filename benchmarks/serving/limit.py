"""The least time that a workload could take: bytes over bandwidth, plus arithmetic over the rate of matrix products.

In the best case all requests begin in the first step and each later step gives every one of them a token, so there are
as many steps as the longest output has tokens, and each reads all weights once. Keys and values are read once for each
token that a request decodes; those of a common prefix once a step for all. Arithmetic is that of the weights alone:
what attention multiplies is left out, which makes the limit shorter. An engine can be faster only where arithmetic and
memory overlap.
"""

from dataclasses import dataclass

from benchmarks.serving.workloads import Workload


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Of a decoder whose head is also its embedding."""

    layer_weights: int  # of all layers' matrices
    head_weights: int
    kv_bytes_per_token: int
    bytes_per_weight: int

    @property
    def weight_bytes(self) -> int:
        return (self.layer_weights + self.head_weights) * self.bytes_per_weight


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does at best: bytes per second read, and floating point operations per second."""

    read_bytes_s: float
    flop_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a workload cannot do without."""

    num_steps: int
    weight_bytes: int
    kv_bytes: int
    flop: int

    def parts_s(self, rates: Rates) -> dict[str, float]:
        """Seconds for each kind of work; the limit is their sum."""
        return {
            "weights": self.weight_bytes / rates.read_bytes_s,
            "kv": self.kv_bytes / rates.read_bytes_s,
            "arithmetic": self.flop / rates.flop_s,
        }

    def limit_s(self, rates: Rates) -> float:
        return sum(self.parts_s(rates).values())


def work_of(workload: Workload, model: ModelCosts) -> Work:
    requests, shared = workload.requests, len(workload.prefix)
    num_steps = max(request.max_tokens for request in requests)
    kv_tokens = shared * num_steps  # of the prefix; the first step reads it too
    num_computed = 0
    for request in requests:
        own, decoded = len(request.prompt) - shared, request.max_tokens - 1
        # The t-th decode step, from 1, sees the prompt and t tokens of the output.
        kv_tokens += decoded * own + decoded * (decoded + 1) // 2
        num_computed += own + decoded
    return Work(
        num_steps=num_steps,
        weight_bytes=num_steps * model.weight_bytes,
        kv_bytes=kv_tokens * model.kv_bytes_per_token,
        flop=2 * (model.layer_weights * num_computed + model.head_weights * workload.tokens_out),
    )
