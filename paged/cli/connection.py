"""The flags with which commands reach a scheduler. Secrets come from files or the environment: all can see flags."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import grpc
import grpc.aio
import typer

from paged.channel import open_channel
from paged.client import Client
from paged.credentials import Token, tls_credentials

TOKEN_VARIABLE = "PAGED_TOKEN"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

Tls = Annotated[bool, typer.Option("--tls", envvar="PAGED_TLS", help="Encrypt, and trust the system's own CAs.")]
TlsRoot = Annotated[
    Path | None,
    typer.Option(envvar="PAGED_TLS_ROOT", help="Encrypt, and trust the CA in this PEM file."),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(envvar="PAGED_TLS_CERTIFICATE", help="PEM file of the certificate to show to the scheduler."),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="PAGED_TLS_PRIVATE_KEY", help="PEM file of that certificate's private key.")
]
Authority = Annotated[
    str | None,
    typer.Option(envvar="PAGED_AUTHORITY", help="Name that the scheduler's certificate is of, if not the address's."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="PAGED_TOKEN_FILE", help=f"File with the bearer token; or {TOKEN_VARIABLE} holds it itself."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", envvar="PAGED_INSECURE", help="Send the token even where nothing is encrypted.")
]


@dataclass(frozen=True, slots=True)
class Connection:
    """What the flags before a command say."""

    tls: bool
    tls_root: Path | None
    tls_certificate: Path | None
    tls_private_key: Path | None
    authority: str | None
    token_file: Path | None
    insecure: bool

    @classmethod
    def of(cls, context: typer.Context) -> Self:
        """Of the command that is run."""
        found = context.find_object(cls)
        if found is None:
            raise RuntimeError("the command is run without its app")
        return found

    def client(self, address: str) -> Client:
        """Needs a running event loop. Raises OSError or ValueError where files cannot be used."""
        return Client(
            address,
            credentials=self._credentials(),
            authority=self.authority,
            token=self._token_itself(),
            token_file=self.token_file,
            insecure=self.insecure,
        )

    def channel(self, address: str) -> tuple[grpc.aio.Channel, tuple[tuple[str, str], ...]]:
        """For calls without a client: the channel, which is the caller's to close, and what goes with each call. Needs
        and raises what `client` does."""
        token = Token(self._token_itself(), self.token_file)
        channel = open_channel(
            address,
            credentials=self._credentials(),
            authority=self.authority,
            with_token=bool(token),
            insecure=self.insecure,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        return channel, token.metadata

    def _credentials(self) -> grpc.ChannelCredentials | None:
        files = (self.tls_root, self.tls_certificate, self.tls_private_key)
        return tls_credentials(*files) if self.tls or any(files) else None

    def _token_itself(self) -> str | None:
        return None if self.token_file is not None else os.environ.get(TOKEN_VARIABLE) or None
