"""Runs one job on OpenVINO GenAI (packages openvino-genai and optimum-intel, which converts the model once)."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found,unused-ignore]
import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

CACHE_GB = 4
TOKENS_PER_STEP = 1024


def main() -> None:
    job = json.load(sys.stdin)
    directory = converted(Path(job["model"]), Path(job["cache_dir"]))
    began = time.perf_counter()
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    scheduling.max_num_seqs = job["num_running"]
    scheduling.max_num_batched_tokens = TOKENS_PER_STEP
    scheduling.enable_prefix_caching = job["prefix_caching"]
    engine = genai.ContinuousBatchingPipeline(str(directory), scheduling, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    start_s = time.perf_counter() - began
    generate(engine, job["warm_up"][:1])
    generate(engine, job["warm_up"][1:])
    time.sleep(job["rest_s"])
    began = time.perf_counter()
    tokens = generate(engine, job["requests"])
    seconds = time.perf_counter() - began
    Path(job["result_file"]).write_text(json.dumps({"tokens": tokens, "seconds": seconds, "start_s": start_s}))


def converted(model: Path, cache_dir: Path) -> Path:
    """The model as OpenVINO reads it, made at the first call."""
    directory = cache_dir / f"{model.name}-openvino"
    if directory.is_dir():
        return directory
    with tempfile.TemporaryDirectory(dir=cache_dir) as making:
        tool = Path(sys.executable).with_name("optimum-cli")
        options = ["--model", str(model), "--task", "text-generation-with-past", f"{making}/made"]
        subprocess.run([tool, "export", "openvino", *options], check=True)
        os.replace(f"{making}/made", directory)
    return directory


def generate(engine: Any, requests: list[dict[str, Any]]) -> int:
    """Tokens that came out."""
    prompts = [ov.Tensor(np.array([request["prompt"]], np.int64)) for request in requests]
    options = [
        genai.GenerationConfig(max_new_tokens=request["max_tokens"], ignore_eos=True, do_sample=False)
        for request in requests
    ]
    return sum(len(answer.m_generation_ids[0]) for answer in engine.generate(prompts, options))


if __name__ == "__main__":
    main()
