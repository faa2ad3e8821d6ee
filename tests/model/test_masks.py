"""C8.5: the window that a mask's rule states is the one that is served, however long it is."""

import pytest
import torch
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_causal_mask_function

from executor_svc.model.masks import MAX_MASK_LENGTH, MaskRule
from executor_svc.model.refusal import ModelRefused

CPU = torch.device("cpu")


def window_of(rule, max_model_len: int, argument: int | None = None) -> int | None:
    return MaskRule(rule).window("SomeAttention", argument, max_model_len, CPU)


@pytest.mark.parametrize(
    ("window", "max_model_len"),
    [
        (4096, 1 << 17),
        ((1 << 16) + 1, 1 << 17),
        (100_000, 100_001),
        (MAX_MASK_LENGTH - 1, MAX_MASK_LENGTH),
        (4096, 10 * MAX_MASK_LENGTH),
    ],
)
def test_a_window_that_only_the_mask_states_is_found(window, max_model_len):
    rule = sliding_window_causal_mask_function(window)
    assert window_of(rule, max_model_len) == window_of(rule, max_model_len, argument=window) == window


@pytest.mark.parametrize("max_model_len", [1, 2, 1 << 17, 10 * MAX_MASK_LENGTH])
def test_a_causal_mask_has_no_window(max_model_len):
    assert window_of(causal_mask_function, max_model_len) is None


@pytest.mark.parametrize("argument", [None, MAX_MASK_LENGTH + 1, 2 * MAX_MASK_LENGTH])
def test_a_window_past_what_is_asked_in_full_is_served_up_to_there_and_refused_beyond(argument):
    window = MAX_MASK_LENGTH + 5
    rule = sliding_window_causal_mask_function(window)
    assert window_of(rule, MAX_MASK_LENGTH) is None
    assert window_of(rule, 2 * MAX_MASK_LENGTH, argument=window) == window
    with pytest.raises(ModelRefused, match=f"set max_model_len to {MAX_MASK_LENGTH} or less"):
        window_of(rule, 2 * MAX_MASK_LENGTH, argument)


@pytest.mark.parametrize("window", [99_999, 100_001])
def test_a_layer_whose_long_window_is_not_that_of_its_mask_is_refused(window):
    with pytest.raises(ModelRefused, match=f"not a causal one with a window of {window}"):
        window_of(sliding_window_causal_mask_function(100_000), 1 << 17, argument=window)


def test_a_mask_that_hides_one_token_far_out_is_refused():
    hidden = and_masks(causal_mask_function, lambda batch, head, query, key: key != 99_999)
    with pytest.raises(ModelRefused, match="not a causal one"):
        window_of(hidden, 1 << 17)


def test_layers_that_share_a_mask_have_it_asked_once():
    asked = []

    def rule(batch, head, query, key):
        asked.append(query)
        return causal_mask_function(batch, head, query, key)

    mask, counts = MaskRule(rule), []
    for name, argument in (("first", None), ("second", None), ("other window", 1 << 12)):
        assert mask.window(name, argument, 1 << 12, CPU) == argument
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1] < counts[2]
