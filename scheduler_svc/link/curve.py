"""CURVE on the plan stream: who we are, and which executors we talk to. Nobody else reads, or changes, what is said."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

KEY_BYTES = 32


class BadKeys(ValueError):
    """A file of keys cannot be used. Names the file; nothing of its contents."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Our own pair, and the executors' public key; 40 characters of Z85 each."""

    public: bytes
    executor: bytes
    secret: bytes = field(repr=False)

    def guard(self, socket: zmq.Socket) -> None:
        """Before it connects."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.executor


def read_curve_keys(own: Path, executor: Path) -> CurveKeys:
    """From files as `paged keys` makes them, and pyzmq's `create_certificates`. Raises BadKeys."""
    public, secret = _read(own)
    if secret is None:
        raise BadKeys(f"{own}: has no secret key; it takes the file that ends in key_secret")
    if zmq.curve_public(secret) != public:
        raise BadKeys(f"{own}: its public key is not that of its secret key")
    return CurveKeys(public, _read(executor)[0], secret)


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except OSError as error:
        raise BadKeys(f"{path}: cannot be read: {error.strerror or 'no such file'}") from None
    except ValueError:
        raise BadKeys(f"{path}: has no public key") from None
    if not all(key is None or _is_key(key) for key in (public, secret)):
        raise BadKeys(f"{path}: a key is not 40 characters of Z85")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (KeyError, ValueError, struct.error):  # no character of Z85, a length, or a number above 32 bits
        return False
