"""What a caller may give, where protobuf would name no option, or would take a text apart.

Each function returns the value as the messages hold it; its TypeError or ValueError begins with the option's name.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from paged.v1 import inference_pb2


@contextmanager
def named(name: str) -> Iterator[None]:
    """Has the errors of what a message cannot hold begin with the option's name."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:  # not of the error's own class: that of a lone surrogate takes five arguments
        raise ValueError(f"{name}: {error}") from None


def entries(name: str, value: Any, due: str = "a list") -> list[Any]:
    """The entries of any iterable, once; TypeError for a text, which is not a list of its letters or bytes."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise _not_due(name, value, due)
    return list(value)


def texts(name: str, value: Any) -> list[str]:
    """The entries, each of them a text."""
    found = entries(name, value, "a list of texts")
    for i, entry in enumerate(found):
        if not isinstance(entry, str):
            raise _not_due(f"{name}: entry {i}", entry, "a text")
    return found


def text_or_texts(name: str, value: Any) -> list[str]:
    """A list of texts; one text is a list of itself."""
    return [value] if isinstance(value, str) else texts(name, value)


def token_ids(name: str, value: Any) -> list[int]:
    """Token ids in a list; whether each is one shows where the message is made."""
    return entries(name, value, "a list of token ids")


def token_id_lists(name: str, value: Any) -> list[inference_pb2.TokenIds]:
    """Lists of token ids, such as no answer may contain."""
    lists = [token_ids(f"{name}: entry {i}", entry) for i, entry in enumerate(entries(name, value))]
    with named(name):
        return [inference_pb2.TokenIds(ids=ids) for ids in lists]


def logit_biases(name: str, value: Any) -> list[inference_pb2.LogitBias]:
    """What is added to the logits of some tokens."""
    if not isinstance(value, Mapping):
        raise _not_due(name, value, "a dict of token ids and their biases")
    with named(name):
        return [inference_pb2.LogitBias(token_id=i, bias=bias) for i, bias in value.items()]


def choice(name: str, value: Any) -> inference_pb2.Choice:
    """The texts of which the answer is one."""
    options = texts(name, value)
    with named(name):
        return inference_pb2.Choice(options=options)


def schema(name: str, value: Any) -> str:
    """A JSON schema as text; a text stays as it is."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise _not_due(name, value, "an object (a dict), or the text of a schema")
    with named(name):
        return json.dumps(value)


def seconds(name: str, value: Any) -> float:
    """A time that gRPC can wait."""
    if not isinstance(value, Real):
        raise _not_due(name, value, "a number of seconds")
    if not math.isfinite(value):
        raise ValueError(f"{name}: is {value}; must be a finite number of seconds, or left out")
    return float(value)


def prompt_field(prompt: Any) -> dict[str, Any]:
    """The prompt under the name that its kind has in GenerateRequest."""
    if isinstance(prompt, str | inference_pb2.Chat):
        return text_or_chat("prompt", prompt)
    ids = entries("prompt", prompt, "a text, token ids, or a chat(...)")
    with named("prompt"):
        return {"token_ids": inference_pb2.TokenIds(ids=ids)}


def text_or_chat(name: str, value: Any) -> dict[str, Any]:
    """The same, as TokenizeRequest has it too."""
    if isinstance(value, inference_pb2.Chat):
        return {"chat": value}
    if not isinstance(value, str):
        raise _not_due(name, value, "a text, or a chat(...)")
    with named(name):
        value.encode()  # no message can hold a lone surrogate
    return {"text": value}


def chat_message(index: int, message: Any) -> inference_pb2.ChatMessage:
    """One of those given to `chat`, by its place among them."""
    due = "a (role, content) pair of texts, or a dict with these two keys"
    name = f"chat: message {index}"
    if isinstance(message, Mapping):
        parts = [message.get("role"), message.get("content")]
    else:
        parts = entries(name, message, due)
    if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"{name}: must be {due}")
    with named(name):
        return inference_pb2.ChatMessage(role=parts[0], content=parts[1])


def _not_due(name: str, value: Any, due: str) -> TypeError:
    return TypeError(f"{name}: is of type {type(value).__name__}; must be {due}")
