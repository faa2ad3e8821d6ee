"""Certificates, CURVE keys and tokens of a test, as `paged keys` makes them."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from typer.testing import CliRunner

from paged.cli.app import app
from paged.client import tls_credentials

HOST = "scheduler.test"


def run_keys(*arguments: str) -> str:
    """`paged keys`, in this process; what it prints."""
    done = CliRunner().invoke(app, ["keys", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


@dataclass(frozen=True)
class Keys:
    """What `paged keys create` has made."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> "Keys":
        run_keys("create", str(directory), "--host", HOST, "--host", "127.0.0.1", "--host", "localhost")
        return cls(directory)

    @property
    def tls(self) -> Path:
        return self.directory / "tls"

    @property
    def curve(self) -> Path:
        return self.directory / "curve"

    @property
    def token_file(self) -> Path:
        return self.directory / "tokens.toml"

    @property
    def operator(self) -> str:
        return (self.directory / "operator.token").read_text().strip()

    def token(self, name: str, *flags: str) -> str:
        """A new one, in the file."""
        return run_keys("token", str(self.token_file), name, *flags).strip()

    @property
    def scheduler_flags(self) -> list[str]:
        """Towards callers: TLS, client certificates, tokens."""
        tls = self.tls
        return [
            *("--tls-certificate", str(tls / "server.pem"), "--tls-private-key", str(tls / "server-key.pem")),
            *("--tls-client-ca", str(tls / "ca.pem"), "--token-file", str(self.token_file)),
        ]

    @property
    def link_flags(self) -> list[str]:
        """Of a scheduler, towards executors."""
        own, executor = self.curve / "scheduler.key_secret", self.curve / "executor.key"
        return ["--curve-key-file", str(own), "--curve-executor-key", str(executor)]

    @property
    def executor_flags(self) -> list[str]:
        own, allowed = self.curve / "executor.key_secret", self.curve / "allowed"
        return ["--curve-key-file", str(own), "--curve-allowed-keys", str(allowed)]

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """With the client's certificate."""
        return tls_credentials(self.tls / "ca.pem", self.tls / "client.pem", self.tls / "client-key.pem")

    @property
    def root_only(self) -> grpc.ChannelCredentials:
        return tls_credentials(self.tls / "ca.pem")
