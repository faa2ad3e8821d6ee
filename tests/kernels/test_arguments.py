"""What the kernels accept: any strides that make sense, and nothing of a kind that would be misread."""

import os
import subprocess
import sys

import pytest
import torch

import kernels
from kernels import KernelInputError
from kernels.cpu import supported
from tests.kernels.pool import MIXED, NATIVE, TRITON, Pool


def test_views_of_one_buffer_are_as_good_as_caches_of_their_own(plain_backend):
    """C9.6: [blocks, 2, block size, ...], a layer of many, and padded heads."""
    expected = Pool(MIXED, backend=plain_backend).attention()
    for interleaved in ("blocks", "layers", "heads"):
        pool = Pool(MIXED, backend=plain_backend)
        if interleaved == "heads":
            both = torch.cat([pool.key_cache, pool.value_cache, torch.full_like(pool.key_cache, torch.nan)], dim=-1)
            pool.key_cache, pool.value_cache = both[..., :16], both[..., 16:32]
        else:
            dim = 1 if interleaved == "blocks" else 0
            both = torch.stack([pool.key_cache, pool.value_cache], dim=dim)
            pool.key_cache, pool.value_cache = both.unbind(dim)
        assert interleaved == "layers" or not pool.key_cache.is_contiguous()
        assert torch.equal(pool.attention(), expected)
        k, v = torch.ones(1, 2, 16), torch.full((1, 2, 16), 2.0)
        before = both.clone()
        plain_backend.write_kv(k, v, pool.key_cache, pool.value_cache, torch.tensor([9]))
        assert (pool.key_cache[2, 1] == 1).all()
        assert (pool.value_cache[2, 1] == 2).all()
        assert (both.nan_to_num(9.0) != before.nan_to_num(9.0)).sum() <= 64


def test_queries_may_be_a_slice_of_a_fused_projection(backend):
    pool = Pool(MIXED, backend=backend)
    expected = pool.attention()
    fused = torch.cat([pool.q.flatten(1), torch.full((len(pool.q), 64), torch.nan)], 1)
    pool.q = fused[:, :64].unflatten(1, (4, 16))
    assert torch.equal(pool.attention(), expected)
    pool.q = pool.q.transpose(0, 1).contiguous().transpose(0, 1)  # as a model hands them over: heads first
    assert torch.equal(pool.attention(), expected)


def test_tables_may_be_a_part_of_wider_ones(backend):
    pool = Pool(MIXED, backend=backend)
    expected = pool.attention()
    wide = torch.full((len(MIXED), 40), -1, dtype=torch.int32)
    wide[:, : pool.tables.shape[1]] = pool.tables
    pool.tables = wide[:, : pool.tables.shape[1]]
    assert torch.equal(pool.attention(), expected)


@pytest.mark.parametrize("name", ["q", "key_cache", "value_cache", "tables", "contexts", "query_start", "sinks"])
def test_a_tensor_whose_last_dimension_is_spread_out_works_or_is_refused_by_name(backend, name):
    """C9.4, C9.6: read with the wrong stride, every second number would be taken."""
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    pool = Pool(MIXED, backend=backend)
    is_refused = backend is TRITON or (backend in NATIVE and name.endswith("cache"))
    expected = None if is_refused else pool.attention(sinks=sinks)
    whole = sinks if name == "sinks" else getattr(pool, name)
    spread = torch.stack([whole, torch.zeros_like(whole)], -1)[..., 0]
    assert spread.stride(-1) == 2
    if name == "sinks":
        sinks = spread
    else:
        setattr(pool, name, spread)
    if is_refused:
        named = {"tables": "block_tables", "contexts": "context_lens"}.get(name, name)
        with pytest.raises(KernelInputError, match=rf"^{named}: .*"):
            pool.attention(sinks=sinks)
    else:
        torch.testing.assert_close(pool.attention(sinks=sinks), expected, atol=1e-6, rtol=1e-6)


def replace(name, change):
    return lambda pool: setattr(pool, name, change(getattr(pool, name)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *((replace("tables", lambda t, d=dtype: t.to(d)), "block_tables") for dtype in (torch.int64, torch.uint8)),
        *((replace("contexts", lambda t, d=dtype: t.to(d)), "context_lens") for dtype in (torch.int64, torch.uint8)),
        *((replace("query_start", lambda t, d=dtype: t.to(d)), "query_start") for dtype in (torch.int64, torch.uint8)),
        (replace("tables", lambda tables: tables.to("meta")), "block_tables"),
        (replace("contexts", lambda contexts: contexts.to("meta")), "context_lens"),
        (replace("q", lambda q: q.to("meta")), "q"),
        (replace("tables", lambda tables: tables[:-1]), "block_tables"),
        (replace("query_start", lambda start: start[:-1]), "query_start"),
        (replace("q", lambda q: q[..., :8]), "q"),
        (replace("q", lambda q: q[:, :3]), "q"),
        (replace("q", lambda q: q.double()), "q"),
        (replace("value_cache", lambda cache: cache[:-1]), "value_cache"),
        (replace("value_cache", lambda cache: cache.half()), "value_cache"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(backend, change, named):
    """C9.4: nothing is read as what it is not."""
    pool = Pool(MIXED, backend=backend)
    change(pool)
    with pytest.raises(KernelInputError, match=rf"^{named}:"):
        pool.attention()


@pytest.mark.parametrize("options", [{"window": 0}, {"soft_cap": 0.0}, {"sinks": torch.ones(3)}])
def test_options_out_of_range_are_refused_by_name(backend, options):
    with pytest.raises(KernelInputError, match=f"^{next(iter(options))}:"):
        Pool(MIXED, backend=backend).attention(**options)


def test_what_is_made_of_rows_is_made_once_for_each_key():
    rows, made = Pool(MIXED).paged_rows(), []
    for key in ("a", "b", "a"):
        assert rows.once(key, lambda key=key: made.append(key)) is None
    assert made == ["a", "b"]


def test_bfloat16_is_refused_by_triton_in_its_interpreter():
    """C9.5: the interpreter computes it wrongly, which a test would take for a fault of the kernel, or miss one."""
    pool = Pool(MIXED, dtype=torch.bfloat16)
    pool.backend = TRITON
    with pytest.raises(KernelInputError, match="interpreter computes bfloat16 wrongly"):
        pool.attention()
    with pytest.raises(KernelInputError, match="interpreter computes bfloat16 wrongly"):
        TRITON.write_kv(pool.q[:, :2], pool.q[:, :2], pool.key_cache, pool.value_cache, torch.arange(len(pool.q)))


def run_python(program, **environment):
    """The output of a program in a Python of its own, without TRITON_INTERPRET unless it is given."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_setting_the_interpreter_after_the_import_is_noticed():
    """C9.5: the kernels were made for a GPU by then; memory of the CPU is refused, not handed to it."""
    program = """
import os, torch
from kernels import KernelInputError, triton
os.environ["TRITON_INTERPRET"] = "1"
cache = torch.zeros(2, 4, 1, 16)
try:
    triton.write_kv(cache[0, :1], cache[0, :1], cache, cache, torch.tensor([1]))
except KernelInputError as error:
    print(error)
"""
    assert "is on cpu, which the Triton kernels cannot reach" in run_python(program)


def test_a_cpu_needs_no_triton_and_a_gpu_without_it_is_told_which_package_is_missing():
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
import torch, kernels
print(kernels.backend(torch.device("cpu")).name)
try:
    kernels.backend(torch.device("cuda", 0))
except kernels.KernelInputError as error:
    print(error)
"""
    chosen, message = run_python(program).splitlines()
    assert chosen == kernels.backend(torch.device("cpu")).name
    assert "needs the package triton" in message


def test_the_kind_of_device_alone_decides_on_the_backend():
    best = f"cpu {supported()[0]}" if supported() else "reference"
    assert kernels.backend(torch.device("cpu")).name == best
    assert kernels.backend(torch.device("cuda", 1)).name == "triton"
    with pytest.raises(KernelInputError, match=r"^device: is meta"):
        kernels.backend(torch.device("meta"))
