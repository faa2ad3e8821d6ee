"""The Triton kernels as a GPU gets them: compiled here, without one."""

import json
import os
import re
import subprocess
import sys

import pytest

# Out of the interpreter, which the rest of this directory runs in: each starts a Python of its own.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def resources(*arguments, timeout_s):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel_resources", "--json", *arguments],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["kernels"], done.returncode


def assert_fits(kernels, code):
    """No spill, and shared memory within the limit, on each architecture."""
    assert {found["architecture"] for found in kernels} == {80, 90, 100}
    assert {found["kernel"] for found in kernels} == {"attention", "merge", "write"}
    wrong = [found for found in kernels if found["stack_bytes"] or found["shared_bytes"] > found["shared_limit"]]
    assert wrong == []
    assert code == 0


def test_representative_kernels_spill_nothing_and_fit_into_shared_memory():
    assert_fits(*resources("--representative", timeout_s=400))


@pytest.mark.slow
def test_every_kernel_spills_nothing_and_fits_into_shared_memory():
    assert_fits(*resources(timeout_s=1500))


PRODUCTS = """
from benchmarks.kernel_resources import DEVICES, Variant, _write
variant = Variant("bf16", 128, 128, "mixed")
launches = variant.launches(DEVICES[90]) + _write(variant, DEVICES[90])
for launch in launches:
    print("KERNEL", launch.name)
    print(launch.compiled(90).asm["ttir"])
"""


def test_no_stride_is_multiplied_in_32_bits():
    """C9.1: block * stride, slot * stride and token * stride are 64-bit from the first product on, in every kernel."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    kernels = done.stdout.split("KERNEL ")[1:]
    assert [text.split("\n")[0] for text in kernels] == ["attention_kernel", "merge_kernel", "write_kernel"]
    for text in kernels[0], kernels[2]:  # the merge takes no strides
        strides = {name for name in re.findall(r"%[\w.]+", text) if name.endswith("_stride")}
        assert len(strides) >= 7
        for line in text.splitlines():
            result, _, operation = line.strip().partition(" = ")
            operands = set(re.findall(r"%[\w.]+", operation))
            narrow = re.search(r": (tensor<\S*x)?i32", operation)
            if operation.startswith("tt.splat") and operands & strides:
                strides.add(result)  # one stride for a whole tile is still a stride
            # A 32-bit number may be multiplied by a constant of the tile, never by a stride.
            assert not (operation.startswith("arith.muli") and narrow and operands & strides), line


LAUNCHES = """
import torch
from benchmarks.kernel_resources import DEVICES, Variant
for rows in (2, 512):
    for kind in ("decode", "mixed", "wide"):
        for launch in Variant("bf16", 128, 128, kind, rows=rows).launches(DEVICES[90]):
            print(launch.name, *launch.grid)
"""


def test_a_launch_is_made_from_shapes_alone():
    """On tensors without memory: whatever reads a value, or waits for a device to tell it, fails there."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES], env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    launches = [line.split() for line in done.stdout.splitlines()]
    few, many = launches[: launches.index(["attention_kernel", "512", "8", "1"])], launches[-3:]
    assert ["merge_kernel", "2", "32"] in few
    assert few[0] == ["attention_kernel", "2", "8", "16"]
    assert [name for name, *_ in many] == ["attention_kernel"] * 3
