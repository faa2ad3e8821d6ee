"""CURVE on the executor's socket: only schedulers whose public keys are allowed come in, and nobody reads along."""

import time
from pathlib import Path

import structlog
import zmq
from zmq.auth import load_certificate, load_certificates
from zmq.auth.thread import ThreadAuthenticator

from executor_svc.router import EndpointTaken
from paged.followed import Followed

_DOMAIN = "paged"
_BETWEEN_LINES_S = 1.0

_log = structlog.get_logger()


class BadKeys(EndpointTaken, ValueError):
    """A file of keys cannot be used. Names the file; nothing of its contents."""


class CurveGuard:
    """Guards the socket of one context. Keys are asked for in a thread of its own: a step, or the loading of a model,
    keeps nobody's handshake waiting.

    `own` is a file with a secret key, `allowed` a file or a directory of files (*.key) with public ones, read again
    when they change. Raises BadKeys.
    """

    def __init__(self, own: Path, allowed: Path) -> None:
        self._public, secret = _read(own)
        if secret is None:
            raise BadKeys(f"{own}: has no secret key; it takes the file that ends in key_secret")
        if _public_of(secret, own) != self._public:
            raise BadKeys(f"{own}: its public key is not that of its secret key")
        self._secret = secret
        self._allowed = Followed(
            [allowed],
            lambda: _read_allowed(allowed),
            lambda error: _log.error("allowed_keys_not_reloaded", reason=str(error)),
            on_change=lambda keys: _log.info("allowed_keys_reloaded", keys=len(keys)),
        )
        self._authenticator: ThreadAuthenticator | None = None
        self._num_refused, self._next_line = 0, 0.0

    def protect(self, context: zmq.Context, socket: zmq.Socket) -> None:
        """Before the socket is bound. `stop` must come before the context's end."""
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it, nobody to ask would mean that all may come in
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret

    def stop(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer with this public key may come in; called by the authenticator."""
        try:
            if key in self._allowed.current:
                return True
        except Exception:  # noqa: BLE001 - it would end the authenticator, and with it all handshakes
            _log.exception("key_not_checked")
            return False
        self._num_refused += 1
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _BETWEEN_LINES_S
            _log.warning("scheduler_refused", public_key=key.decode(), refused_so_far=self._num_refused)
        return False


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except OSError as error:
        raise BadKeys(f"{path}: cannot be read: {error.strerror or 'no such file'}") from None
    except ValueError:
        raise BadKeys(f"{path}: has no public key") from None


def _public_of(secret: bytes, path: Path) -> bytes:
    try:
        return zmq.curve_public(secret)
    except (zmq.ZMQError, ValueError):
        raise BadKeys(f"{path}: its secret key is not 40 characters of Z85") from None


def _read_allowed(path: Path) -> frozenset[bytes]:
    if not path.is_dir():
        return frozenset([_read(path)[0]])
    try:
        return frozenset(load_certificates(path))
    except (OSError, ValueError) as error:
        raise BadKeys(f"{path}: {error}") from None
