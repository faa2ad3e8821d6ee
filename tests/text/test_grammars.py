"""Grammars: whatever is drawn by the masks, the text is one that was asked for; and it ends where it may."""

import json
import random
import re
import threading

import numpy as np
import pytest

from scheduler_svc.text import grammars as grammars_module
from scheduler_svc.text.grammars import Grammar, Grammars, GrammarStuck, Matcher, NotAllowed, UnusableGrammar
from scheduler_svc.text.text_stream import TextStream
from scheduler_svc.text.tokenizer import Tokenizer
from tests.text import models

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["fox", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SUM = 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'
END = 1  # </s> in both vocabularies


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request) -> Tokenizer:
    return Tokenizer(getattr(models, request.param)(), None)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


def ids_of(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(matcher: Matcher, chance: random.Random, ends: tuple[int, ...] = (END,), most: int = 400) -> list[int]:
    """Tokens drawn evenly from what the masks allow, until the text has ended."""
    ids: list[int] = []
    mask = matcher.follow(())
    while mask is not None and len(ids) < most:
        token = chance.choice(ids_of(mask))
        if token in ends:
            break
        ids.append(token)
        mask = matcher.follow([token])
    return ids


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """As a client reads it."""
    stream = TextStream(tokenizer, tokenizer.encode("The quick"))
    return stream.push(ids).text + stream.finish().text


@pytest.mark.parametrize("pattern", ["[a-f]{2,9}!", "(fox|dog)( [0-9]+)?", "é{1,3}😀?", "[0-9]{3}-[0-9]{4}", " +x"])
def test_every_text_matches_its_regex_from_end_to_end(pattern, tokenizer, grammars):
    chance = random.Random(1)
    matcher = grammars.matcher(Grammar("regex", pattern), [END])
    texts = {text_of(tokenizer, walk(matcher.copy(), chance)) for _ in range(30)}
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(texts) > 2


def test_every_text_is_json_that_satisfies_its_schema(tokenizer, grammars):
    chance, kinds = random.Random(2), set()
    matcher = grammars.matcher(Grammar("json_schema", json.dumps(PERSON)), [END])
    for _ in range(20):
        text = text_of(tokenizer, walk(matcher.copy(), chance))
        person = json.loads(text)
        assert set(person) == set(PERSON["properties"])
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 150
        assert person["kind"] in ("fox", "dog")
        assert 1 <= len(person["tags"]) <= 3
        assert all(isinstance(tag, bool) for tag in person["tags"])
        assert max(map(len, re.findall(r"\s+", text)), default=0) <= 20
        kinds.add(person["kind"])
    assert kinds == {"fox", "dog"}


def test_every_text_is_one_of_the_choices_and_each_of_them_can_be(tokenizer, grammars):
    options = ("fox", "fox jumps", 'a "quoted" \\ one', "two\nlines", "été 漢字 😀")
    chance = random.Random(3)
    matcher = grammars.matcher(Grammar("choice", options), [END])
    assert {text_of(tokenizer, walk(matcher.copy(), chance)) for _ in range(120)} == set(options)


def test_every_text_is_of_the_language_that_a_lark_grammar_describes(tokenizer, grammars):
    chance = random.Random(4)
    matcher = grammars.matcher(Grammar("lark", SUM), [END])
    complete = [ids for ids in (walk(matcher.copy(), chance, most=60) for _ in range(40)) if len(ids) < 60]
    texts = [text_of(tokenizer, ids) for ids in complete]
    assert all(isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int) for text in texts)
    assert any("(" in text for text in texts)


def test_end_tokens_are_allowed_exactly_where_the_grammar_may_end(tokenizer, grammars):
    ends = [END, 3]
    matcher = grammars.matcher(Grammar("regex", "ab*"), ends)
    (a,), (b,) = (tokenizer._library.encode(x, add_special_tokens=False).ids[-1:] for x in ("xa", "xb"))
    assert not {END, 3} & set(ids_of(matcher.follow(())))
    assert {END, 3, b} <= set(ids_of(matcher.follow([a])))
    assert a not in ids_of(matcher.follow([b]))


def test_a_token_of_the_text_that_is_an_end_token_too_waits_for_the_end(tokenizer, grammars):
    (b,) = tokenizer._library.encode("xb", add_special_tokens=False).ids[-1:]
    (a,) = tokenizer._library.encode("xa", add_special_tokens=False).ids[-1:]
    matcher = grammars.matcher(Grammar("regex", "ab|aa+"), [b])
    matcher.follow(())
    assert b not in ids_of(matcher.follow([a]))
    assert b in ids_of(matcher.follow([a]))


def test_without_an_end_token_a_complete_text_ends_by_itself(tokenizer, grammars):
    matcher = grammars.matcher(Grammar("choice", ("dog",)), [])
    ids = walk(matcher, random.Random(5), ends=())
    assert text_of(tokenizer, ids) == "dog"


def test_copies_go_their_own_ways(tokenizer, grammars):
    first = grammars.matcher(Grammar("regex", "[ab]x|[cd]y"), [END])
    second = first.copy()
    a, c = (tokenizer._library.encode(f"x{x}", add_special_tokens=False).ids[-1] for x in "ac")
    first.follow(())
    assert ids_of(first.follow([a])) != ids_of(second.follow([c]))


def test_no_id_is_allowed_that_the_model_or_the_tokenizer_lacks(tokenizer):
    known = tokenizer.vocab_size
    for vocab_size in (known - 7, known, known + 1, known + 100):
        anything = Grammars(tokenizer, vocab_size).matcher(Grammar("regex", "(?s:.)+"), [END])
        mask = anything.follow(())
        assert len(mask) == -(-vocab_size // 32) * 4
        assert max(ids_of(mask)) < min(vocab_size, known)
        assert not {0, 1, 2, 3} & set(ids_of(mask)), "special tokens have no text"


def test_no_id_is_allowed_that_has_no_text_though_a_grammar_names_it(tokenizer, grammars):
    for ids in ("<[0]>", "<[0-3]>"):
        with pytest.raises(GrammarStuck):
            grammars.matcher(Grammar("lark", f"start: {ids}"), [END]).follow(())
    anything = grammars.matcher(Grammar("lark", 'start: <[*]> "a"'), [END])
    assert not {0, 1, 2, 3} & set(ids_of(anything.follow(())))


def test_a_kept_grammar_is_found_and_used_while_another_is_compiled(tokenizer):
    grammars, kept = Grammars(tokenizer, tokenizer.vocab_size), Grammar("regex", "a")
    grammars.compile(kept)
    found = []

    def find() -> None:
        found.append(grammars.knows(kept))
        found.append(grammars.matcher(kept, [END]).follow(()) is not None)

    with grammars._turn:  # as while it compiles
        finding = threading.Thread(target=find, daemon=True)
        finding.start()
        finding.join(5)
    assert found == [True, True]


def test_a_token_that_the_grammar_does_not_allow_is_told(tokenizer, grammars):
    matcher = grammars.matcher(Grammar("choice", ("fox",)), [END])
    with pytest.raises(NotAllowed):
        matcher.follow(tokenizer._library.encode("dog", add_special_tokens=False).ids)


def test_a_grammar_that_leads_where_the_model_has_no_token_is_told():
    library = models.tokenizers.Tokenizer(models.models.BPE(vocab={"a": 0, "</s>": 1, "b": 2}, merges=[]))
    library.decoder = models.decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    matcher = Grammars(Tokenizer(library, None), 3).matcher(Grammar("regex", "acb"), [END])
    with pytest.raises(GrammarStuck):
        walk(matcher, random.Random(6))


def test_ids_above_gaps_in_the_vocabulary_are_allowed_as_far_as_the_model_has_them():
    vocab = {"a": 0, "</s>": 1, "b": 2, "z": 5, "zz": 50}
    library = models.tokenizers.Tokenizer(models.models.BPE(vocab=vocab, merges=[("z", "z")]))
    library.decoder = models.decoders.ByteLevel()
    library.pre_tokenizer = models.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["</s>"])
    for vocab_size, ids in ((51, [5, 50]), (64, [5, 50]), (50, [5]), (6, [5])):
        matcher = Grammars(Tokenizer(library, None), vocab_size).matcher(Grammar("regex", "zz|z"), [1])
        assert ids_of(matcher.follow(())) == ids
        matcher = Grammars(Tokenizer(library, None), vocab_size).matcher(Grammar("regex", "zz"), [1])
        assert ids_of(matcher.follow(())) == ids[-1:]  # there is one way to write what must follow


def test_a_tokenizer_whose_tokens_are_no_pieces_of_text_is_refused():
    unusable = Grammars(Tokenizer(models.word_piece(), None), 200)
    with pytest.raises(UnusableGrammar, match="tokenizer"):
        unusable.matcher(Grammar("regex", "a+"), [])


def test_compiled_grammars_are_kept_as_long_as_they_are_used(tokenizer, monkeypatch):
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 2)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    first, second, third = (Grammar("regex", f"{letter}+") for letter in "abc")
    for grammar in (first, second, first, third):
        grammars.matcher(grammar, [])
    assert [grammars.knows(grammar) for grammar in (first, second, third)] == [True, False, True]


class Clock:
    """Of a thread that spends `seconds` between two looks."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def thread_time(self) -> float:
        self.now += self.seconds
        return self.now


def test_answers_of_a_request_whose_masks_become_slow_end_by_what_all_took(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = grammars.matcher(Grammar("lark", 'start: s\ns: s s | "a"'), [END])
    a = next(token for token in ids_of(first.follow(())) if token != END)
    monkeypatch.setattr(grammars_module, "time", Clock(grammars_module.SLOW_S + grammars_module.MAX_SLOW_S / 2.5))
    second = first.copy()
    other = grammars.matcher(first.grammar, [END])
    first.follow([a])
    second.follow([a])
    with pytest.raises(GrammarStuck, match="too long"):
        first.follow([a])
    with pytest.raises(GrammarStuck, match="too long"):
        second.follow([a])
    other.follow(())
    other.follow([a])  # of another request


def test_masks_of_usual_length_may_be_as_many_as_they_like(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = grammars.matcher(Grammar("regex", "a*"), [END])
    monkeypatch.setattr(grammars_module, "time", Clock(grammars_module.SLOW_S / 2))
    a = next(token for token in ids_of(matcher.follow(())) if token != END)
    for _ in range(1000):
        matcher.follow([a])
