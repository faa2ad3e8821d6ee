"""A step gets no more threads than the process may use cores."""

import pytest
import torch

from executor_svc.model import control_groups, threads
from executor_svc.model.threads import cores_of_group, set_threads


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_share_of_a_control_group_is_read_in_both_versions(monkeypatch, tmp_path, files, cores):
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores_of_group() == cores


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/system.slice/paged.service\n", {"system.slice/paged.service/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.0),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2.0),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("0::/outside\n", {"cpu.max": "200000 100000\n"}, 2.0),  # a container sees its group as the root
    ],
)
def test_it_is_that_of_the_groups_which_the_process_is_in(monkeypatch, tmp_path, own, files, cores):
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "root")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert cores_of_group() == cores


@pytest.mark.parametrize(("limit", "taken"), [(None, 4), (8.0, 4), (2.5, 2), (0.5, 1)])
def test_torch_is_given_no_more_than_that(monkeypatch, limit, taken):
    torch.set_num_threads(4)
    monkeypatch.setattr(threads, "cores_of_group", lambda: limit)
    set_threads(None)
    assert torch.get_num_threads() == taken


def test_a_number_that_is_given_is_taken(monkeypatch):
    monkeypatch.setattr(threads, "cores_of_group", lambda: 1.0)
    set_threads(3)
    assert torch.get_num_threads() == 3
