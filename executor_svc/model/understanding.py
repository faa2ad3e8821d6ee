"""From a model in memory to one that is understood: checked, proved, and of replaced modules where there are any.

All of that is found out at the first start. A later one does what was found again, and looks only at whether the model
then computes what it did.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from transformers import PreTrainedModel

from executor_svc.model import fused, rotary
from executor_svc.model.facts import rope_switch_len
from executor_svc.model.kept_proof import KeptProof, ProofFile, Unusable
from executor_svc.model.progress import Progress
from executor_svc.model.proof import ProvenLayer, prove
from executor_svc.model.refusal import reason
from executor_svc.model.rehearsal import rehearse
from kernels import Backend

log = structlog.get_logger(__name__)

CHECKING = "checking the model"


@dataclass(frozen=True, slots=True)
class Serving:
    """What a model is to be served with, and where its proof is kept: None for nowhere."""

    max_model_len: int
    kernels: Backend
    products: fused.Products | None
    kept: ProofFile | None


@dataclass(frozen=True, slots=True)
class Understood:
    """A model whose attention layers are known; `fused` is None where no modules were replaced."""

    model: PreTrainedModel
    serving: Serving
    layers: list[ProvenLayer]
    rope_switch_len: int
    long_tokens: rotary.LongTokens
    fused: fused.Fused | None


def understand(
    load: Callable[[], PreTrainedModel], serving_of: Callable[[PreTrainedModel], Serving], progress: Progress
) -> Understood:
    """A model that turns out not to be what was proved is loaded again, and proved. Raises ModelRefused."""
    model = load()
    serving = serving_of(model)
    if serving.kept is not None and (proof := serving.kept.read()) is not None:
        try:
            return _as_proved(model, proof, serving, progress)
        except Unusable as error:
            log.warning("kept_proof_not_used", reason=str(error))
        serving.kept.drop()  # first: what follows may take more memory than there is
        del model
        gc.collect()  # replacements and their modules know each other
        model = load()
    understood = _proved(model, serving, progress)
    if serving.kept is not None and understood.fused is not None:
        serving.kept.write(KeptProof.of(model, understood.layers, understood.fused.recipe))
    return understood


def _proved(model: PreTrainedModel, serving: Serving, progress: Progress) -> Understood:
    max_model_len, kernels, products = serving.max_model_len, serving.kernels, serving.products
    with fused.packed_head(model, products):
        progress(CHECKING, 0, 2)
        layers = prove(model, max_model_len)
        progress(CHECKING, 1, 2)
        rehearse(model, layers, max_model_len, kernels)
        progress(CHECKING, 2, 2)
    switch_len = rope_switch_len(model.config, max_model_len)
    long_tokens = rotary.install(model, switch_len)
    replaced = None
    if products is not None:
        replaced = fused.fuse(model, layers, kernels, products, max_model_len, progress)
    return Understood(model, serving, layers, switch_len, long_tokens, replaced)


def _as_proved(model: PreTrainedModel, proof: KeptProof, serving: Serving, progress: Progress) -> Understood:
    """Raises Unusable where the model is not what was proved; it is then of no use."""
    max_model_len, kernels, products = serving.max_model_len, serving.kernels, serving.products
    if products is None:
        raise Unusable("no modules are to be replaced")
    try:
        layers = proof.layers_of(model)
        switch_len = rope_switch_len(model.config, max_model_len)
        long_tokens = rotary.install(model, switch_len)
        replaced = fused.fuse_again(model, layers, kernels, products, max_model_len, proof.as_recipe(), progress)
    except Exception as error:  # of a file that says what it should not, or of a model's own code
        raise Unusable(f"{type(model).__name__} is not what was proved: {reason(error)}") from error
    return Understood(model, serving, layers, switch_len, long_tokens, replaced)
