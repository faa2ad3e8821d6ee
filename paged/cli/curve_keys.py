"""CURVE key pairs for the plan stream, in files as CZMQ and pyzmq read them."""

import struct
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from paged.cli import secret_files

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"  # ZeroMQ's RFC 32


def make_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """NAME.key with the public key, and NAME.key_secret with both. Raises FileExistsError."""
    key = X25519PrivateKey.generate()
    public, secret = _z85(key.public_key().public_bytes_raw()), _z85(key.private_bytes_raw())
    public_file, secret_file = directory / f"{name}.key", directory / f"{name}.key_secret"
    secret_files.make(secret_file, _lines(public, secret), secret=True)
    secret_files.make(public_file, _lines(public), secret=False)
    return public_file, secret_file


def _lines(public: str, secret: str | None = None) -> bytes:
    text = f'metadata\ncurve\n    public-key = "{public}"\n'
    return (text if secret is None else f'{text}    secret-key = "{secret}"\n').encode()


def _z85(data: bytes) -> str:
    numbers = struct.unpack(f">{len(data) // 4}I", data)
    return "".join(_Z85[number // 85**power % 85] for number in numbers for power in (4, 3, 2, 1, 0))
