"""Every kernel against the reference, on the device, over a grid of shapes and options."""

from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from benchmarks.gpu.addresses import far_blocks
from benchmarks.gpu.backends import REFERENCE, checked_backend, checked_dtypes, prepare
from benchmarks.gpu.batches import Batch, Heads, make_batch, random_kv
from benchmarks.gpu.compare import Distance, distance, same_bits
from benchmarks.gpu.kernel_cases import Case, grid
from benchmarks.gpu.parallel import side_by_side
from benchmarks.gpu.sections import Machine, Report
from kernels import Backend, Rule

MOST_ERRORS = 8  # told in full
SPLIT_COUNTS = (1, 2, 3, 5, 8)


@dataclass(frozen=True, slots=True)
class Checked:
    """A case's result: how far from the reference, and what is wrong with it."""

    distance: Distance
    errors: tuple[str, ...]


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    backend = checked_backend(device)
    report.add(backend=backend.name)
    for error in (*copies_are_wrong(backend, device), *splits_are_wrong(device)):
        report.fail(error)
    figures, errors = far_blocks(backend, device)
    report.add(**figures)
    for error in errors:
        report.fail(error)
    cases = list(grid(checked_dtypes(device), tiny=machine.tiny))
    results = dict(side_by_side(partial(check_case, device_name=machine.device), cases, machine, report))
    _report_grid(results, len(cases), report)


def _report_grid(results: dict[Case, Checked | Exception], num_cases: int, report: Report) -> None:
    worst: dict[str, dict[str, float]] = {}
    wrong: list[tuple[Case, str]] = []
    for case, result in results.items():
        if isinstance(result, Exception):
            wrong.append((case, f"{type(result).__name__}: {result}"))
            continue
        wrong += [(case, error) for error in result.errors]
        name = str(case.dtype).removeprefix("torch.")
        figures = worst.setdefault(name, {"cases": 0, "absolute_error": 0.0, "relative_error": 0.0})
        figures["cases"] += 1
        for of, error in (("absolute", result.distance.absolute), ("relative", result.distance.relative)):
            if not error <= figures[f"{of}_error"]:  # NaN counts as more
                figures[f"{of}_error"] = error
    report.add(cases=len(results), cases_planned=num_cases, cases_wrong=len({case for case, _ in wrong}), worst=worst)
    if len(results) < num_cases:
        report.fail(f"there was time for {len(results)} of {num_cases} cases")
    for case, wrong_how in wrong[:MOST_ERRORS]:
        report.fail(f"{wrong_how}: {case}")


def check_case(case: Case, device_name: str) -> Checked:
    """Both kernels on one batch. What stands in slots that are in no row's context must not change a bit."""
    device = torch.device(device_name)
    prepare(device)
    backend = checked_backend(device)
    seed = len(str(case)) + case.heads.dim

    def batch(fill: float) -> Batch:
        return make_batch(
            case.rows, case.heads, block_size=case.block_size, dtype=case.dtype, device=device, seed=seed, fill=fill
        )

    clean, poisoned, right = batch(0.0), batch(float("nan")), batch(0.0)
    k, v = random_kv(clean, seed + 1)
    for target, writer in ((clean, backend), (poisoned, backend), (right, REFERENCE)):
        writer.write_kv(k, v, target.key_cache, target.value_cache, target.slots)
    errors = [
        f"write_kv leaves another {name} than the reference"
        for name in ("key_cache", "value_cache")
        if not same_bits(getattr(clean, name), getattr(right, name))
    ]
    rule = _rule(case, device)
    expected = right.attend(REFERENCE, rule)
    out = _attend_on_dirty_memory(clean, backend, rule)
    found = distance(out, expected)
    if not found.within(case.dtype):
        errors.append(f"paged_attention is off by {found.relative:.3g} of a vector's length")
    if not same_bits(out, _attend_on_dirty_memory(poisoned, backend, rule)):
        errors.append("NaN in unused slots changes the result")
    return Checked(found, tuple(errors))


def _rule(case: Case, device: torch.device) -> Rule:
    sinks = torch.linspace(-2, 3, case.heads.query, device=device) if case.sinks else None
    # Twice the usual scale: sharper weights, in which a lost key shows.
    return Rule(2 * case.heads.dim**-0.5, case.window, case.soft_cap, sinks)


def _attend_on_dirty_memory(batch: Batch, backend: Backend, rule: Rule) -> torch.Tensor:
    """The allocator hands out what was freed last: an output element that is not written shows as NaN."""
    shape = (*batch.q.shape[:2], batch.value_cache.shape[3])
    torch.full(shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    return batch.attend(backend, rule)


def copies_are_wrong(backend: Backend, device: torch.device) -> list[str]:
    """copy_blocks, a chain among the copies included: sources are read before any destination is written."""
    caches = [torch.randn(40, 16, 2, 64, device=device) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    source = torch.tensor([3, 5, 7, 9], device=device)
    destination = torch.tensor([5, 7, 20, 3], device=device)
    backend.copy_blocks(caches, source, destination)
    REFERENCE.copy_blocks(expected, source, destination)
    right = all(same_bits(cache, other) for cache, other in zip(caches, expected, strict=True))
    return [] if right else ["copy_blocks gives other blocks than the reference"]


def splits_are_wrong(device: torch.device) -> list[str]:
    """A context cut into any number of parts, empty ones among them, gives what it gives whole."""
    from kernels.triton import attention

    errors = []
    for dtype in checked_dtypes(device):
        heads = Heads(4, 1, 64)
        batch = make_batch([(1, 200), (1, 3), (1, 0), (2, 65)], heads, block_size=16, dtype=dtype, device=device)
        for window, sinks in ((None, None), (70, torch.linspace(-1, 2, 4, device=device))):
            rule = Rule(heads.dim**-0.5, window, sinks=sinks)
            expected = batch.attend(REFERENCE, rule)
            for splits in SPLIT_COUNTS:
                out = _split(attention, batch, splits, rule)
                found = distance(out, expected)
                if not found.within(dtype):
                    errors.append(f"{splits} parts of a context, {dtype}, window {window}: off by {found.relative:.3g}")
    return errors


def _split(attention: ModuleType, batch: Batch, splits: int, rule: Rule) -> torch.Tensor:
    """The public function chooses the number of parts by itself; here it is given."""
    q, cache = batch.q, batch.key_cache
    group = q.shape[1] // cache.shape[2]
    dtype, dim = attention.dot_dtype(q, cache), q.shape[2]
    tile = attention.tile_for("decode", group, dim, dim, dtype, attention.check_device(q.device).shared_memory_bytes)
    return attention.attend(q, cache, batch.value_cache, batch.rows(), rule, tile, splits)
