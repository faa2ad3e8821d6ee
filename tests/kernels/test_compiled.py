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
    assert {found["kernel"] for found in kernels} == {"attention", "merge", "shared", "merge_shared", "write"}
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
shares = Variant("bf16", 128, 128, "decode", members=8)
launches = variant.launches(DEVICES[90]) + shares.launches(DEVICES[90])[1:] + _write(variant, DEVICES[90])
for launch in launches:
    print("KERNEL", launch.name)
    print(launch.compiled(90).asm["ttir"])
"""


# The products that cannot but fit into 32 bits: numbers of tokens, of heads, and of positions of a context.
NARROW = {
    "attention_kernel": {"first_token", "head", "part", "begin"},
    "merge_kernel": set(),
    "shared_kernel": {"first_member", "head", "part", "begin", "stop"},
    "merge_shared_kernel": set(),
    "write_kernel": set(),
}


def test_no_offset_is_multiplied_in_32_bits():
    """C9.1: those of q, of the results, of their parts and of the caches are 64-bit from the first product on."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for text in done.stdout.split("KERNEL ")[1:]:
        products = re.findall(r"%(\w+) = arith\.muli .* : (?:tensor<[\dx]+x)?i(\d+)", text)
        assert len([bits for _, bits in products if bits == "64"]) >= 3
        narrow = {re.sub(r"_\d+$", "", name) for name, bits in products if bits != "64"}
        found[text.split("\n")[0]] = narrow
    assert found == NARROW


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


JUST_IN_TIME = """
import triton
from triton.backends.compiler import GPUTarget
from benchmarks.kernel_resources import DEVICES, Variant, _write

class Driver:  # what Triton asks of a driver before it launches
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

triton.runtime.driver.set_active(Driver())
launches = _write(Variant("bf16", 64, 64, "decode"), DEVICES[90])
for rows in (1, 2, 3, 5, 8, 17, 64, 500):
    launches += Variant("bf16", 64, 64, "decode", rows=rows).launches(DEVICES[90])
for members in (2, 3, 8, 16):
    launches += Variant("bf16", 64, 64, "decode", rows=2 * members, members=members).launches(DEVICES[90])
for launch in launches:
    compiled = launch.kernel.warmup(**launch.arguments, grid=launch.grid, **launch.options)
    print(launch.name, compiled.hash, compiled.asm["ptx"] == launch.compiled(90).asm["ptx"])
"""


def test_triton_takes_the_arguments_of_each_launch_and_compiles_nothing_anew_for_another_number_of_rows():
    """Its own just-in-time compiler binds them, up to the launch. What it makes of them is what is measured here; a
    decode step of 1 to 500 rows needs a kernel for whole contexts, one for contexts in parts, and their merge."""
    done = subprocess.run(
        [sys.executable, "-c", JUST_IN_TIME], env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    launches = [line.split() for line in done.stdout.splitlines()]
    assert {same for *_, same in launches} == {"True"}
    kernels = {(name, compiled) for name, compiled, _ in launches}
    # Of rows that share, what they have of their own is for a kernel of its own, too.
    shared = ["merge_shared_kernel", "shared_kernel"]
    names = sorted(name for name, _ in kernels)
    assert names == sorted(["attention_kernel"] * 3 + ["merge_kernel", "write_kernel"] + shared)
