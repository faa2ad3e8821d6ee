"""Which device serves: a GPU where there is one; and each thing that is missing for it has a sentence of its own."""

import dataclasses

import pytest
import torch

from executor_svc.model import device
from executor_svc.model.device import Machine, check_capability, choose_device, refusing_out_of_memory
from executor_svc.model.refusal import ModelRefused

WORKING = Machine(
    torch_version="2.13.0",
    cuda_build=True,
    has_gpu=True,
    hidden=False,
    num_gpus=1,
    driver_error="",
    has_triton=True,
)
NONE_VISIBLE = "No CUDA GPUs are available"
NOT_FOUND = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."
FAULTS = [
    ({"cuda_build": False, "num_gpus": 0}, "build without CUDA; install torch for CUDA"),
    (
        {"hidden": True, "num_gpus": 0, "driver_error": NONE_VISIBLE},
        "CUDA_VISIBLE_DEVICES names no GPU",
    ),
    ({"num_gpus": 0, "driver_error": NOT_FOUND}, "no NVIDIA driver was found"),
    ({"num_gpus": 0, "driver_error": TOO_OLD}, r"too old for torch 2\.13\.0 .*found version 11040.*update the driver"),
    ({"num_gpus": 0, "driver_error": NONE_VISIBLE}, "shows no GPU .*nvidia-smi"),
    ({"has_triton": False}, r"triton.*is missing: pip install 'paged-inference\[gpu\]'"),
]


def machine(**changes) -> Machine:
    return dataclasses.replace(WORKING, **changes)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_with_all_it_needs_is_taken(name):
    assert choose_device(name, WORKING) == torch.device("cuda", 0)
    assert choose_device("cpu", WORKING) == torch.device("cpu")


@pytest.mark.parametrize(("changes", "sentence"), FAULTS)
def test_a_gpu_that_is_asked_for_and_cannot_be_had_is_refused_with_what_to_do(changes, sentence):
    with pytest.raises(ModelRefused, match=f"device is cuda, but .*{sentence}.*or set device to cpu"):
        choose_device("cuda", machine(**changes))


@pytest.mark.parametrize(("changes", "sentence"), FAULTS)
def test_without_a_gpu_auto_is_the_cpu_whatever_else_is_missing(changes, sentence):
    assert choose_device("auto", machine(has_gpu=False, **changes | {"num_gpus": 0})) == torch.device("cpu")


@pytest.mark.parametrize(("changes", "sentence"), [FAULTS[i] for i in (2, 3, 4, 5)])
def test_auto_does_not_do_without_a_gpu_for_a_fault_of_the_installation(changes, sentence):
    with pytest.raises(ModelRefused, match=f"there is a GPU, but .*{sentence}"):
        choose_device("auto", machine(**changes))


def test_a_gpu_that_the_environment_hides_is_left_alone_by_auto():
    assert choose_device("auto", machine(**FAULTS[1][0])) == torch.device("cpu")


def test_torch_without_cuda_serves_on_the_cpu_and_says_that_a_gpu_is_idle(capsys):
    assert choose_device("auto", machine(**FAULTS[0][0])) == torch.device("cpu")
    assert "gpu_not_used" in capsys.readouterr().out


def test_this_machine_is_looked_at_as_it_is(monkeypatch):
    found = Machine.look()
    assert found.torch_version == torch.__version__
    assert found.num_gpus == torch.cuda.device_count()
    assert choose_device("auto") in (torch.device("cpu"), torch.device("cuda", 0))
    for value, hidden in (("", True), ("-1", True), ("0", False), ("GPU-1f", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert Machine.look().hidden == hidden


def test_bfloat16_needs_a_gpu_that_computes_in_it():
    check_capability(torch.bfloat16, (8, 0), "A100")
    check_capability(torch.float16, (7, 5), "T4")
    with pytest.raises(ModelRefused, match=r"T4 has 7\.5; set dtype to float16"):
        check_capability(torch.bfloat16, (7, 5), "T4")


def test_running_out_of_memory_while_loading_names_what_is_needed_available_and_to_be_lowered(monkeypatch):
    monkeypatch.setattr(device, "available_bytes", lambda _: 5_000)
    sentence = r"KV memory: 9000 bytes are required, and 5000 bytes are available on cpu; set num_blocks .*tried"
    with (
        pytest.raises(ModelRefused, match=sentence),
        refusing_out_of_memory("KV memory", torch.device("cpu"), needed=9_000, lower="set num_blocks to less"),
    ):
        raise torch.OutOfMemoryError("tried to allocate")
