"""The benchmark of sharing counts what is shared, and nothing else."""

from benchmarks.sharing import lengths_of, saved


def test_one_sample_and_one_beam_share_nothing_and_more_share_more() -> None:
    assert saved(lengths_of("short"), 1, 5, beams=False) == saved(lengths_of("short"), 1, 5, beams=True) == 0
    for beams in (False, True):
        assert 0 < saved(lengths_of("long"), 2, 3, beams=beams) < saved(lengths_of("long"), 4, 3, beams=beams) < 1
    assert saved(lengths_of("long"), 4, 3, beams=True) > saved(lengths_of("long"), 4, 3, beams=False)


def test_of_lengths_without_end_so_many_are_taken_in_their_order() -> None:
    assert saved([(16, 1), (900, 900)], 2, 1, beams=False) == saved([(16, 1)], 2, 1, beams=False) > 0
