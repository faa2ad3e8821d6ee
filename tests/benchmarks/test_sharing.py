"""The benchmark of sharing counts what is shared, and nothing else."""

from benchmarks.sharing import saved


def test_one_sample_and_one_beam_share_nothing_and_more_share_more() -> None:
    assert saved("short", 1, 5, beams=False) == saved("short", 1, 5, beams=True) == 0
    for beams in (False, True):
        assert 0 < saved("long", 2, 3, beams=beams) < saved("long", 4, 3, beams=beams) < 1
    assert saved("long", 4, 3, beams=True) > saved("long", 4, 3, beams=False)
