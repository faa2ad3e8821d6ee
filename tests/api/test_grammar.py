"""A request's grammar at the API: sizes are checked there, and what passes reaches the engine as it was sent."""

import pytest

from paged.client import generate_request
from paged.v1.inference_pb2 import Choice, GenerateRequest, Grammar
from scheduler_svc.api.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, grammar_of, grammar_violations
from scheduler_svc.text import grammars

LONG = "a" * (MAX_GRAMMAR_BYTES + 1)


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (Grammar(), "grammar"),
        (Grammar(regex=""), "grammar.regex"),
        (Grammar(json_schema=LONG), "grammar.json_schema"),
        (Grammar(regex="é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "grammar.regex"),
        (Grammar(lark=LONG), "grammar.lark"),
        (Grammar(choice=Choice()), "grammar.choice.options"),
        (Grammar(choice=Choice(options=["a"] * (MAX_CHOICES + 1))), "grammar.choice.options"),
        (Grammar(choice=Choice(options=["a", ""])), "grammar.choice.options[1]"),
        (Grammar(choice=Choice(options=[""])), "grammar.choice.options[0]"),  # once: there is an option, an empty one
        (Grammar(choice=Choice(options=[LONG[: MAX_GRAMMAR_BYTES // 2 + 1]] * 2)), "grammar.choice.options"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grammar_that_is_empty_or_too_large_is_refused_by_name(grammar, field):
    violations = grammar_violations(GenerateRequest(grammar=grammar))
    assert [violation.field for violation in violations] == [field]


def test_a_list_of_bad_choices_gives_no_list_as_long():
    violations = grammar_violations(GenerateRequest(grammar=Grammar(choice=Choice(options=[""] * 1000))))
    assert len(violations) < 20


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        ({}, None),
        ({"regex": "a" * MAX_GRAMMAR_BYTES}, grammars.Grammar("regex", "a" * MAX_GRAMMAR_BYTES)),
        ({"choice": ["x", "y"]}, grammars.Grammar("choice", ("x", "y"))),
        ({"json_schema": {"type": "null"}}, grammars.Grammar("json_schema", '{"type": "null"}')),
        ({"json_schema": "true"}, grammars.Grammar("json_schema", "true")),
        ({"lark": 'start: "a"'}, grammars.Grammar("lark", 'start: "a"')),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_client_says_is_what_the_engine_gets(options, grammar):
    request = generate_request("x", **options)
    assert grammar_violations(request) == []
    assert grammar_of(request) == grammar


def test_a_client_cannot_ask_for_two_grammars_or_mistake_a_string_for_choices():
    with pytest.raises(TypeError, match="regex and lark"):
        generate_request("x", regex="a", lark="b")
    with pytest.raises(TypeError, match="choice"):
        generate_request("x", choice="yes")
