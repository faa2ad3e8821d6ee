"""What is on top of a protobuf message, without reading what is in it."""

_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}  # kinds of fields; the last ones with their lengths
_MOST_FIELDS = 64  # that are looked at: no message of ours has as many on top, but a list may


def without(data: bytes, number: int) -> tuple[bytes, int] | None:
    """The message without its field of that number, and how many bytes that had: a text, or a message.

    None where there is no such field, where there are several, or where the bytes are no message.
    """
    at, found = 0, None
    try:
        for _ in range(_MOST_FIELDS):
            if at >= len(data):
                break
            begin = at
            tag, at = _varint(data, at)
            length, at = _content(data, at, tag & 7)
            if tag >> 3 == number and tag & 7 == _BYTES:
                if found is not None:
                    return None
                found = (begin, at + length, length)
            at += length
    except ValueError:
        return None
    if found is None or at != len(data):
        return None
    begin, end, length = found
    return data[:begin] + data[end:], length


def _content(data: bytes, at: int, kind: int) -> tuple[int, int]:
    """Of a field its length, and where it begins. ValueError where there is no such kind."""
    if kind == _VARINT:
        return 0, _varint(data, at)[1]
    if kind == _BYTES:
        return _varint(data, at)
    if kind in _FIXED:
        return _FIXED[kind], at
    raise ValueError(f"no field is of kind {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends. ValueError where it does not."""
    value = 0
    for position, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, at + position + 1
    raise ValueError("a number does not end")
