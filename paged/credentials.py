"""What a client shows to a scheduler, and what it demands of it: certificates and a bearer token."""

from pathlib import Path

import grpc

from paged.addresses import is_loopback
from paged.followed import Followed

_LISTED = ("ipv4:", "ipv6:")


def tls_credentials(
    root_certificates: Path | str | None = None,
    certificate: Path | str | None = None,
    private_key: Path | str | None = None,
) -> grpc.ChannelCredentials:
    """TLS, from PEM files: the CA that the scheduler's certificate must come from (the system's own if None), and the
    client's certificate and its key, where the scheduler asks for one. Raises OSError, and ValueError for half a pair.
    """
    if (certificate is None) != (private_key is None):
        raise ValueError("certificate and private_key go together; give both or neither")
    root, key, chain = (
        None if path is None else Path(path).read_bytes() for path in (root_certificates, private_key, certificate)
    )
    return grpc.ssl_channel_credentials(root, key, chain)


class Token:
    """A bearer token: the text itself, or a file with it, which is read again when it changes.

    Raises OSError or ValueError where there is none.
    """

    def __init__(self, token: str | None = None, token_file: Path | str | None = None) -> None:
        if token is not None and token_file is not None:
            raise ValueError("give either token or token_file")
        self._token = None if token is None else _checked(token, "token")
        self._file: Followed[str] | None = None
        if token_file is not None:
            path = Path(token_file)
            # A file that has gone bad leaves the old token in use: the scheduler says what it thinks of that one.
            self._file = Followed([path], lambda: _checked(path.read_text(), str(path)), lambda error: None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        token = self._file.current if self._file is not None else self._token
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def __bool__(self) -> bool:
        return self._token is not None or self._file is not None


def is_local_target(target: str) -> bool:
    """Whether calls to this target of gRPC's cannot leave the machine."""
    if target.startswith("unix:"):
        return True
    for scheme in _LISTED:
        if target.startswith(scheme):
            return all(is_loopback(_host(address)) for address in target.removeprefix(scheme).split(","))
    if not target.startswith("dns:"):
        return is_loopback(_host(target))
    return is_loopback(_host(target.removeprefix("dns:").rpartition("/")[2]))


def _host(address: str) -> str:
    return address.rpartition(":")[0] or address


def _checked(text: str, where: str) -> str:
    """Nothing of the text is in the error."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where}: holds no token; it must be one word of printable ASCII")
    return token
