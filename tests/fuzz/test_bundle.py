"""Whatever an executor sends as its tokenizer: it can be used, or somebody is told what is wrong with it."""

import contextlib
import io
import json
import zipfile
from collections import Counter
from typing import Any

import pytest

from executor_svc.simulated.byte_tokenizer import make_bundle
from scheduler_svc.errors import PagedError
from scheduler_svc.text.bundle import BadBundle
from scheduler_svc.text.tokenizer import Tokenizer
from tests.fuzz.messages import FLOATS, SIGNED_64, TEXTS, Fuzzer
from tests.text.models import bundle_of, byte_fallback, byte_level, metaspace, word_piece

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
    "chat_template": CHAT_TEMPLATE,
}
DEFAULTS = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}


def bundles() -> list[dict[str, bytes]]:
    """Of every kind, unpacked."""
    files = {"tokenizer_config.json": CONFIG, "generation_config.json": DEFAULTS, "config.json": {"model_type": "x"}}
    made = [bundle_of(make(), files) for make in (byte_level, byte_fallback, word_piece, metaspace)]
    return [unpacked(data) for data in (*made, make_bundle(300, 64, 257))]


def unpacked(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def change_json(value: Any, fuzzer: Fuzzer) -> Any:
    """Something in it is another value, gone, or there twice."""
    chance = fuzzer.chance
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: change_json(value[key], fuzzer)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        match chance.randrange(4):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], change_json(value[place], fuzzer), *value[place + 1 :]]
    return chance.choice(
        (None, True, [], {}, chance.choice(TEXTS), chance.choice(SIGNED_64), chance.choice(FLOATS), "ByteLevel", value)
    )


def changed(files: dict[str, bytes], fuzzer: Fuzzer) -> bytes:
    chance, files = fuzzer.chance, dict(files)
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(list(files))
        match chance.randrange(8):
            case 0:
                files[name] = fuzzer.damaged(files[name])
            case 1 if len(files) > 1:
                del files[name]
            case 2:
                files[chance.choice(("chat_template.jinja", "special_tokens_map.json", "../x", "x" * 300))] = files[
                    name
                ]
            case _:
                try:
                    files[name] = json.dumps(change_json(json.loads(files[name]), fuzzer)).encode()
                except ValueError:  # damaged already, or no JSON
                    files[name] = chance.randbytes(20)
    data = packed(files)
    return fuzzer.damaged(data) if chance.random() < 0.1 else data


def use(tokenizer: Tokenizer) -> None:
    """All that a request may ask of it; what it cannot do is an error of ours."""
    for step in (
        lambda: tokenizer.decode(tokenizer.encode("Once upon a time, é👩"), skip_special_tokens=True),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "Who is there?"}]),
        lambda: tokenizer.spellings("word"),
        lambda: tokenizer.lower_bound_tokens("some words"),
        lambda: tokenizer.token_bytes(300),
        lambda: tokenizer.new_decoder(skip_special_tokens=False).push([0, 5, 299, 10**6]),
    ):
        with contextlib.suppress(PagedError):
            step()


def load_changed(seed: int, count: int) -> Counter[str]:
    fuzzer, whole, outcomes = Fuzzer(seed), bundles(), Counter[str]()
    for _ in range(count):
        data = changed(fuzzer.chance.choice(whole), fuzzer)
        try:
            tokenizer = Tokenizer.from_bundle(data)
        except BadBundle:
            outcomes["refused"] += 1
            continue
        use(tokenizer)
        outcomes["used"] += 1
    return outcomes


def test_a_tokenizer_that_was_changed_is_used_or_refused() -> None:
    outcomes = load_changed(1, 300)
    assert min(outcomes["used"], outcomes["refused"]) > 30


@pytest.mark.slow
def test_a_tokenizer_that_was_changed_is_used_or_refused_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = load_changed(2, 10_000)
    with capsys.disabled():
        print(f"fuzzing, tokenizers: {outcomes.total()}, {dict(outcomes)}")
    assert outcomes.total() == 10_000
