"""What ranks tell each other, as bytes: a JSON header that says what there is, then the columns, little-endian.

A message is made of None, bools, ints, strings, lists, numpy arrays, sampling parameters and the dataclasses of the
step; nothing else is written, and reading makes nothing else. All ranks run the same code, so there are no versions.
"""

import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_svc import step
from paged.v1 import executor_pb2

_ALIGNMENT = 8  # bytes; numpy reads its widest type from there
_HEADER_SIZE = np.dtype("<u4")
_DATACLASSES = {name: kind for name, kind in vars(step).items() if isinstance(kind, type) and is_dataclass(kind)}
_KINDS = "biuf"  # of arrays: bool, signed, unsigned, float


def encode(value: Any) -> bytes:
    """Raises TypeError for what has no form."""
    body = bytearray()
    header = json.dumps(_describe(value, body), separators=(",", ":")).encode()
    size = np.array(len(header), _HEADER_SIZE).tobytes()
    head = size + header
    return b"".join((head, bytes(-len(head) % _ALIGNMENT), body))


def decode(message: NDArray[np.uint8]) -> Any:
    """What was encoded; its arrays are views of `message`, and as writable as that is."""
    begin = _HEADER_SIZE.itemsize
    end = begin + int(message[:begin].view(_HEADER_SIZE)[0])
    body = message[end + -end % _ALIGNMENT :]
    return _rebuild(json.loads(message[begin:end].tobytes()), body)


def _describe(value: Any, body: bytearray) -> Any:
    """The header's node for `value`, whose bytes go to the end of `body`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [_describe(item, body) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        array = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return {"array": [array.dtype.str, list(array.shape), *_append(array.tobytes(), body)]}
    if isinstance(value, executor_pb2.RowSampling):
        return {"sampling": _append(value.SerializeToString(), body)}
    name = type(value).__name__
    if _DATACLASSES.get(name) is not type(value):
        raise TypeError(f"{name} cannot be told to other ranks")
    return {name: {field.name: _describe(getattr(value, field.name), body) for field in fields(value)}}


def _append(data: bytes, body: bytearray) -> list[int]:
    """Returns where it is."""
    begin = len(body)
    body += data
    body += bytes(-len(body) % _ALIGNMENT)
    return [begin, len(data)]


def _rebuild(node: Any, body: NDArray[np.uint8]) -> Any:
    if isinstance(node, list):
        return [_rebuild(item, body) for item in node]
    if not isinstance(node, dict):
        return node
    [(name, content)] = node.items()
    if name == "array":
        dtype, shape, begin, size = content
        return body[begin : begin + size].view(np.dtype(dtype)).reshape(shape)
    if name == "sampling":
        begin, size = content
        return executor_pb2.RowSampling.FromString(body[begin : begin + size].tobytes())
    return _DATACLASSES[name](**{field: _rebuild(own, body) for field, own in content.items()})
