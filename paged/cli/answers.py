"""Answers and facts on standard output: for people as they come, or for scripts as JSON, one object a line."""

import json
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from paged.cli.show import printable
from paged.v1 import inference_pb2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line, for scripts.")]


class Answer:
    """One that is put together from the messages of its stream."""

    def __init__(self) -> None:
        self.text = ""
        self._last = inference_pb2.GenerateResponse()

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        self.text += message.text
        self._last = message

    @property
    def usage(self) -> inference_pb2.Usage:
        """What it took; known when its last message has come."""
        return self._last.usage

    def as_json(self) -> str:
        """With how it ended, and what it took."""
        last = self._last
        told = {"request_id": last.request_id, "text": self.text}
        return json.dumps(told | {"finish": as_dict(last.finish), "usage": as_dict(last.usage)}, ensure_ascii=False)


def as_dict(message: Message) -> dict[str, Any]:
    """With the names of the protos, and all fields that have a value even if nobody set one."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def say(text: str) -> None:
    """A piece of an answer, at once."""
    print(printable(text), end="", flush=True)
