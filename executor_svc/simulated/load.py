"""Makes the simulated model from the settings, as the loader makes a real one."""

import hashlib

from executor_svc.loaded import LoadedModel
from executor_svc.settings import ExecutorSettings
from executor_svc.simulated.byte_tokenizer import BOS_ID, make_bundle
from executor_svc.simulated.runner import Latency, SimulatedRunner
from executor_svc.simulated.script import read_script
from paged.v1 import executor_pb2

_DEFAULT_NUM_BLOCKS = 4096


def load_simulated(settings: ExecutorSettings) -> LoadedModel:
    """Raises ScriptError where --simulate-script cannot be used."""
    vocab_size = settings.simulate_vocab_size
    max_model_len = min(settings.simulate_max_model_len, settings.max_model_len or settings.simulate_max_model_len)
    script = read_script(settings.simulate_script, vocab_size) if settings.simulate_script else None
    num_blocks = settings.num_blocks or _DEFAULT_NUM_BLOCKS
    facts = executor_pb2.ModelFacts(
        name=settings.served_name or "simulated",
        architecture="simulated",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=[settings.simulate_eos_id],
        bos_token_id=BOS_ID,
        dtype="int32",
        fingerprint=_fingerprint(vocab_size, script.model_dump_json() if script else ""),
        block_size=settings.block_size,
    )
    runner = SimulatedRunner(
        num_rows=settings.max_rows,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        vocab_size=vocab_size,
        latency=Latency(
            settings.simulate_fixed_us, settings.simulate_per_token_us, settings.simulate_per_context_token_ns
        ),
        script=script,
    )
    bundle = make_bundle(vocab_size, max_model_len, settings.simulate_eos_id)
    longest_step_s = (settings.simulate_fixed_us + settings.simulate_per_token_us * settings.tokens_per_step) / 1e6
    return LoadedModel(runner, facts, bundle, num_blocks, warm_up_ms=max(1, round(longest_step_s * 1e3)))


def _fingerprint(vocab_size: int, script: str) -> str:
    """Of what decides the text: a simulated model's weights."""
    return hashlib.sha256(f"simulated 1 {vocab_size} {script}".encode()).hexdigest()
