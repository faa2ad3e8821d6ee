"""Bearer tokens, and their entries in the scheduler's file, which holds hashes alone."""

import hashlib
import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from paged.cli import secret_files

PREFIX = "paged_"  # by which scanners of leaked secrets may know one
TOKEN_BYTES = 32  # so many that a plain hash tells nothing: nobody can try them all


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def entry(token: str, name: str, roles: Sequence[str], tenant: str | None, days: float | None) -> str:
    """As the file has it."""
    lines = [
        "[[tokens]]",
        f"name = {json.dumps(name)}",
        f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"',
        f"roles = {json.dumps(list(roles))}",
    ]
    if tenant is not None:
        lines.append(f"tenant = {json.dumps(tenant)}")
    if days is not None:
        end = datetime.now(UTC) + timedelta(days=days)
        lines.append(f"expires = {end:%Y-%m-%dT%H:%M:%SZ}")
    return "\n".join(lines) + "\n"


def append(path: Path, text: str) -> None:
    """A scheduler that follows the file sees it with the entry, or without, and never half."""
    before = path.read_text() if path.exists() else ""
    separator = "\n" if before else ""
    secret_files.replace(path, (before + separator + text).encode(), secret=True)
