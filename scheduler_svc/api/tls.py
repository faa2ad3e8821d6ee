"""TLS for the gRPC server. Certificates are replaced while it runs: a new connection gets what the files hold then."""

import ssl
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog

from paged.followed import Followed
from scheduler_svc.settings import SchedulerSettings

log = structlog.get_logger()


def server_credentials(settings: SchedulerSettings) -> grpc.ServerCredentials | None:
    """None without TLS. Clients must show a certificate where the settings name who signs those.

    Raises OSError or ValueError where the files cannot be used.
    """
    certificate, key, client_ca = settings.tls_certificate, settings.tls_private_key, settings.tls_client_ca
    if certificate is None or key is None:
        return None
    files = Followed(
        [certificate, key, *([client_ca] if client_ca else [])],
        lambda: _read(certificate, key, client_ca),
        lambda error: log.error("certificates_not_reloaded", reason=str(error)),
        on_change=lambda _: log.info("certificates_reloaded"),
    )
    used = files.current

    def changed() -> Any:  # the published types know no None
        """Asked for at each handshake; None is for what has not changed."""
        nonlocal used
        if files.current == used:
            return None
        used = files.current
        return _configuration(used)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), changed, require_client_authentication=client_ca is not None
    )


def server_context(settings: SchedulerSettings) -> ssl.SSLContext | None:
    """The same for other servers than gRPC's: each handshake has what the files hold then."""
    certificate, key, client_ca = settings.tls_certificate, settings.tls_private_key, settings.tls_client_ca
    if certificate is None or key is None:
        return None
    files = Followed(
        [certificate, key, *([client_ca] if client_ca else [])],
        lambda: _context(certificate, key, client_ca),
        lambda error: None,  # gRPC's own tells of it
    )

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = files.current

    first = files.current
    first.sni_callback = choose
    return first


_Pem = tuple[bytes, bytes, bytes | None]


def _read(certificate: Path, key: Path, client_ca: Path | None) -> _Pem:
    pem = certificate.read_bytes(), key.read_bytes(), client_ca.read_bytes() if client_ca else None
    _context(certificate, key, client_ca)  # gRPC tells nobody of what does not fit together
    return pem


def _context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(f"{certificate} and {key} are no certificate and its key in PEM: {error.reason}") from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ValueError(f"{client_ca} has no certificate in PEM: {error.reason}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> NoReturn:
    raise ValueError("the private key is encrypted; give one that is not, in a file that only this user can read")


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    certificate, key, client_ca = pem
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)
