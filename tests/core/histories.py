"""What random histories of the core are made of."""

from hypothesis import strategies as st

from tests.core.plain_executor import VOCAB_SIZE

STEMS = [[7] * 40, list(range(40)), [3, 1, 4, 1, 5, 9, 2, 6] * 5]
prompts = st.builds(
    lambda stem, kept, tail: STEMS[stem][:kept] + tail,
    st.integers(0, len(STEMS) - 1),
    st.integers(0, 24),
    st.lists(st.integers(0, 49), min_size=1, max_size=5),
)
leases = st.fixed_dictionaries(
    {
        "num_blocks": st.one_of(st.integers(2, 11), st.integers(12, 40)),
        "num_rows": st.integers(2, 10),
        "tokens_to_spare": st.integers(0, 40),
        "block_size": st.sampled_from([1, 4, 16]),
        "max_model_len": st.sampled_from([40, 1000]),
        "rope_switch_len": st.sampled_from([0, 0, 8, 21]),
    }
)
places = st.fixed_dictionaries(
    {
        "priority": st.sampled_from([0, 0, 1, -3]),
        "tenant": st.sampled_from(["", "heavy", "light"]),
        "bypass_cache": st.sampled_from([False, False, True]),
    }
)
requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.one_of(st.none(), st.integers(1, 20)),
        "end_ids": st.sampled_from([(), (5,), (1, 2, 3, 4)]),
        "salt": st.sampled_from(["", "a"]),
        "num_samples": st.sampled_from([1, 2, 3, 4, 6]),
        "masked": st.sampled_from([False, False, True]),
        "place": places,
        "scored": st.sampled_from([False, False, True]),
    }
)
searches = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "width": st.integers(1, 5),
        "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
        "returned": st.integers(1, 5),
        "end_ids": st.sampled_from([(), (1, 2, 3, 4, 5, 6)]),
        "length_penalty": st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        "early_stopping": st.sampled_from([False, True, "never"]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "place": places,
    }
)


def thirds(output: list[int]) -> list[int]:
    """A grammar: which third of the ids may come next depends on all of the output, and after nine tokens none may."""
    first = -(sum(output) + len(output)) % 3
    return list(range(first, VOCAB_SIZE, 3)) if len(output) < 9 else []
