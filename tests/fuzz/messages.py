"""Messages that nobody sends on purpose, made from the protos' descriptors: a field that is added is fuzzed, too.

What is only random is refused at the first check. So most inputs are valid messages with a few changes, some are random
from the start, and some are bytes that are no message at all.
"""

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

SIGNED_32 = (0, 1, -1, 2, 7, 16, 255, 1 << 16, (1 << 31) - 1, -(1 << 31))
UNSIGNED_32 = (0, 1, 2, 3, 15, 16, 17, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
SIGNED_64 = (*SIGNED_32, (1 << 63) - 1, -(1 << 63))
UNSIGNED_64 = (*UNSIGNED_32, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 1e-45, 1e38, 1e4, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "\0",
    "é",
    "👩‍👩‍👧",
    "\u202e",
    "\ufffd",
    " ",
    "\n",
    "{}",
    "[",
    "(a+)+$",
    '{"type": "object"}',
    "start: /x/",
)
MOST_ITEMS = 4
DEEPEST = 4


class Fuzzer:
    """Everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._of_type: dict[int, Callable[[], Any]] = {
            FieldDescriptor.TYPE_BOOL: lambda: self.chance.random() < 0.5,
            FieldDescriptor.TYPE_INT32: lambda: self._number(SIGNED_32, 31, signed=True),
            FieldDescriptor.TYPE_SINT32: lambda: self._number(SIGNED_32, 31, signed=True),
            FieldDescriptor.TYPE_INT64: lambda: self._number(SIGNED_64, 63, signed=True),
            FieldDescriptor.TYPE_UINT32: lambda: self._number(UNSIGNED_32, 32, signed=False),
            FieldDescriptor.TYPE_UINT64: lambda: self._number(UNSIGNED_64, 64, signed=False),
            FieldDescriptor.TYPE_FLOAT: self._float,
            FieldDescriptor.TYPE_DOUBLE: self._float,
            FieldDescriptor.TYPE_STRING: self._text,
            FieldDescriptor.TYPE_BYTES: self._bytes,
        }

    def message(self, kind: type[M], depth: int = 0) -> M:
        """Random, each field set or not."""
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if self.chance.random() < 0.5 and depth < DEEPEST:
                self._set(message, field, depth)
        return message

    def mutated(self, message: M) -> M:
        """A copy with one to three changes, anywhere in it."""
        changed = type(message)()
        changed.CopyFrom(message)
        for _ in range(self.chance.choice((1, 1, 1, 2, 3))):
            part = self.chance.choice(list(_parts(changed)))
            if part.DESCRIPTOR.fields:
                self._change(part, self.chance.choice(part.DESCRIPTOR.fields))
        return changed

    def bytes_of(self, message: Message) -> bytes:
        """As it would be sent; now and then damaged, or nothing but noise."""
        data = message.SerializeToString()
        match self.chance.randrange(8):
            case 0:
                return self.damaged(data)
            case 1 if self.chance.random() < 0.3:
                return self.chance.randbytes(self.chance.choice((0, 1, 3, 40, 3000)))
        return data

    def damaged(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        place = self.chance.randrange(len(damaged) + 1)
        match self.chance.randrange(4):
            case 0:
                del damaged[place:]
            case 1:
                damaged[place:place] = self.chance.randbytes(self.chance.randrange(1, 9))
            case 2:
                damaged[place : place + self.chance.randrange(1, 9)] = b""
            case _:
                for _ in range(3 if damaged else 0):
                    damaged[self.chance.randrange(len(damaged))] ^= 1 << self.chance.randrange(8)
        return bytes(damaged)

    def _change(self, message: Message, field: FieldDescriptor) -> None:
        if self.chance.random() < 0.2:
            message.ClearField(field.name)
        elif field.type == FieldDescriptor.TYPE_BYTES and not field.is_repeated and self.chance.random() < 0.7:
            setattr(message, field.name, self._other_column(getattr(message, field.name)))
        elif field.is_repeated and not _is_map(field) and len(items := getattr(message, field.name)):
            self._change_items(items, field)
        else:
            self._set(message, field, 1)

    def _change_items(self, items: Any, field: FieldDescriptor) -> None:
        place = self.chance.randrange(len(items))
        match self.chance.randrange(3):
            case 0:
                del items[place]
            case 1 if field.message_type is None:
                items[place] = self._value(field, 1)
            case _:
                items.extend([items[place]] * self.chance.choice((1, 1, 2, 100)))

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if _is_map(field):
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)[self._value(key, depth)] = self._value(value, depth)
            return
        if field.is_repeated:
            count = self.chance.choice((1, 1, 2, MOST_ITEMS))
            getattr(message, field.name).extend(self._value(field, depth) for _ in range(count))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self._value(field, depth))
        else:
            setattr(message, field.name, self._value(field, depth))

    def _value(self, field: FieldDescriptor, depth: int) -> Any:
        if field.message_type is not None:
            return self.message(field.message_type._concrete_class, depth + 1)
        if field.enum_type is not None:
            return self.chance.choice([value.number for value in field.enum_type.values] + [99])
        return self._of_type[field.type]()

    def _number(self, edges: tuple[int, ...], bits: int, *, signed: bool) -> int:
        kind = self.chance.random()
        if kind < 0.4:
            return self.chance.randrange(0, 70)
        if kind < 0.8:
            return self.chance.choice(edges)
        number = self.chance.getrandbits(bits)
        return -number if signed and self.chance.random() < 0.5 else number

    def _float(self) -> float:
        return self.chance.choice(FLOATS) if self.chance.random() < 0.6 else self.chance.uniform(-2, 2)

    def _text(self) -> str:
        if self.chance.random() < 0.1:
            return self.chance.choice(TEXTS) * self.chance.choice((1, 100, 2000))
        return "".join(self.chance.choices(TEXTS, k=self.chance.randrange(3)))

    def _bytes(self) -> bytes:
        if self.chance.random() < 0.3:
            return self.chance.randbytes(self.chance.randrange(20))
        return _packed(
            [self._number(SIGNED_32, 31, signed=True) for _ in range(self.chance.choice((0, 1, 1, 2, 5, 70)))]
        )

    def _other_column(self, data: bytes) -> bytes:
        """Of int32, as columns are: an entry changed, doubled, left out; or the bytes damaged."""
        if len(data) < 4 or len(data) % 4 or self.chance.random() < 0.2:
            return self.damaged(data) if data else self._bytes()
        entries = list(struct.unpack(f"<{len(data) // 4}i", data))
        place = self.chance.randrange(len(entries))
        match self.chance.randrange(4):
            case 0:
                entries.append(entries[place])
            case 1:
                del entries[place]
            case _:
                entries[place] = self._number(SIGNED_32, 31, signed=True)
        return _packed(entries)


def _packed(entries: list[int]) -> bytes:
    return struct.pack(f"<{len(entries)}i", *entries)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _parts(message: Message) -> Iterator[Message]:
    """The message and all that it holds."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not _is_map(field):
            for part in value if field.is_repeated else (value,):
                yield from _parts(part)
