"""What generation_config.json says of sampling is taken as transformers takes it, if a request may say it."""

from typing import Any

import pytest

from scheduler_svc.text.sampling_defaults import sampling_defaults


@pytest.mark.parametrize(
    ("stated", "taken"),
    [
        ({}, {}),
        ({"eos_token_id": [1], "max_length": 20, "do_sample": True}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_k": 20, "min_p": 0}, {"temperature": 0.6, "top_k": 20.0, "min_p": 0.0}),
        ({"do_sample": False, "top_k": 5, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"temperature": None, "top_p": "high", "top_k": True}, {}),
        ({"temperature": -1, "top_p": 0.0, "min_p": 1.5, "repetition_penalty": 0}, {}),
        ({"top_p": 1e-50, "temperature": 1e-50, "min_p": 1e300, "top_k": 10**400}, {"temperature": 0.0}),
        ({"temperature": float("nan"), "top_p": float("inf")}, {}),
    ],
)
def test_what_is_stated_is_taken_if_a_request_may_say_it(stated: dict[str, Any], taken: dict[str, float]) -> None:
    assert sampling_defaults(stated) == pytest.approx(taken, rel=1e-6)
