"""The recorder's cost is measured of steps that are the same with and without it."""

from benchmarks.recorder import measure


def test_all_figures_are_of_the_same_steps() -> None:
    found = measure(num_rows=8, rounds=2, steps=40)
    assert found["plain_us"] > 0
    assert found["file_ms"] > 0
    assert found.keys() >= {"recorder_us", "recorder_share", "with_ids_us", "with_ids_share"}
