"""A few steps before and after modules were replaced: logits must stay what they were.

Each replacement has been proved by itself; this is about what lies between them.
"""

import torch
from transformers import PreTrainedModel

from executor_svc.model.fused.agreement import EXACT, ROUNDING, error, given
from executor_svc.model.fused.output import GreedyHead
from executor_svc.model.fused.small_steps import SmallSteps
from executor_svc.model.fused.wanted import Wanted
from executor_svc.model.refusal import ModelRefused, reason

# Relative; and where values are rounded to 16 bits or less, for half of the tokens: rounding may send one to another
# expert, and grows from layer to layer. A fault is as large as the logits.
_ALLOWED, _ALLOWED_ROUNDED = 1e-3, 0.3


class Trial:
    """The steps of one model. Must be made before its modules are replaced."""

    def __init__(self, model: PreTrainedModel, steps: SmallSteps) -> None:
        self._model, self._steps = model, steps
        self._own, _ = steps.run()

    def check(self, greedy: GreedyHead | None) -> None:
        """Raises ModelRefused where logits are others now, or `greedy` finds other tokens than they do."""
        name, model = type(self._model).__name__, self._model
        try:
            logits, found = self._steps.run(greedy)
        except Exception as raised:  # whatever the model's own code raises, of what it misses now
            raise ModelRefused(
                f"{name} does not run with modules replaced ({reason(raised)}); set fused_modules to false"
            ) from raised
        off = [error(new, old) for new, old in zip(logits, self._own, strict=True)]
        is_exact = model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
        difference = max(off) if is_exact else sorted(off)[len(off) // 2]
        if not difference <= (_ALLOWED if is_exact else _ALLOWED_ROUNDED):
            raise ModelRefused(
                f"{name} with modules replaced gives logits that differ by {difference:.2g} from its own; "
                "set fused_modules to false"
            )
        for row, token in zip(logits, found, strict=greedy is not None):
            if not row[token] >= row.max() - row.abs().max() * torch.finfo(model.dtype).eps:
                raise ModelRefused(f"{name} has likelier tokens than its greedy head finds; set fused_modules to false")

    def may_leave_out(self, wanted: Wanted) -> bool:
        """Whether the last hidden states of some of a step's tokens stay what they are where its last layer leaves the
        others out."""
        hidden = given(lambda: self._steps.last_hidden(wanted))
        if hidden is None:
            return False
        whole, some = hidden
        if some is None:
            return False
        return error(some, whole) <= (EXACT if whole.dtype == torch.float32 else ROUNDING)
