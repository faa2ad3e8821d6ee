"""The file of bearer tokens: hashes of them, whose they are, what they open and for how long.

[[tokens]]
name = "web-shop"                # for logs
sha256 = "9f86d081884c7d65..."   # of the token, in hex: the token itself is nowhere but with its owner
roles = ["generate"]             # any of generate, read, control
tenant = "shop"                  # left out: its requests may be any tenant's
expires = 2027-01-01T00:00:00Z   # left out: never

[[tenants]]                      # for those that are to have another share, or limits
name = "shop"
weight = 2.0
max_requests = 64
max_queued_tokens = 200_000
"""

import hashlib
import hmac
import tomllib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from paged.roles import Role
from scheduler_svc.api.caller import Caller
from scheduler_svc.core.tenants import TenantLimits
from scheduler_svc.errors import PermissionDenied, Unauthenticated
from scheduler_svc.settings import TenantName, TenantWeight

MAX_FILE_BYTES = 1 << 26
MAX_ENTRIES = 65_536
MAX_TOKEN_CHARS = 512  # longer ones are not even hashed

_Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[ -~]*$")]


class BadTokenFile(ValueError):
    """The file says nothing that can be used. Names the file and the place; nothing of its contents."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenEntry(_Entry):
    name: _Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    roles: Annotated[frozenset[Role], Field(min_length=1)]
    tenant: TenantName | None = None
    expires: AwareDatetime | None = None


class TenantEntry(_Entry):
    name: TenantName
    weight: TenantWeight = 1.0
    max_requests: PositiveInt | None = None
    max_queued_tokens: PositiveInt | None = None

    def over(self, stated: TenantLimits) -> TenantLimits:
        """These limits, with what is left out as stated elsewhere."""
        return replace(stated, **self.model_dump(exclude_unset=True, exclude={"name"}))


class TokenFile(_Entry):
    """All of the file."""

    tokens: Annotated[tuple[TokenEntry, ...], Field(max_length=MAX_ENTRIES)] = ()
    tenants: Annotated[tuple[TenantEntry, ...], Field(max_length=MAX_ENTRIES)] = ()

    @model_validator(mode="after")
    def _each_once(self) -> "TokenFile":
        for what, values in {
            "names of tokens": [token.name for token in self.tokens],
            "sha256 of tokens": [token.sha256 for token in self.tokens],
            "names of tenants": [tenant.name for tenant in self.tenants],
        }.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{what} must differ")
        return self


class Tokens:
    """What the file says, for callers to be looked up in. Equal files make equal ones."""

    def __init__(self, file: TokenFile, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.file = file
        self._now = now
        self._by_hash = {bytes.fromhex(entry.sha256): entry for entry in file.tokens}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self.file == other.file

    __hash__ = None  # type: ignore[assignment]

    def caller(self, token: str) -> Caller:
        """Whose token it is. Raises Unauthenticated for one that is unknown or has expired."""
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            raise Unauthenticated("the token is not known")
        # What is compared are hashes, which nobody can choose: the time it takes tells nothing of the tokens there are.
        digest = hashlib.sha256(token.encode()).digest()
        return self._caller(digest)

    def again(self, caller: Caller) -> Caller:
        """Who the same token's owner is by now. Raises Unauthenticated, and PermissionDenied where that is another
        tenant."""
        found = self._caller(caller.digest)
        if found.tenant != caller.tenant:
            raise PermissionDenied("the token is another tenant's by now")
        return found

    def _caller(self, digest: bytes) -> Caller:
        entry = self._by_hash.get(digest)
        if entry is None or not hmac.compare_digest(bytes.fromhex(entry.sha256), digest):
            raise Unauthenticated("the token is not known")
        if entry.expires is not None and entry.expires <= self._now():
            raise Unauthenticated("the token has expired")
        return Caller(entry.name, entry.roles, entry.tenant, digest)


def read_tokens(path: Path) -> Tokens:
    """Raises BadTokenFile, or OSError where it cannot be read."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadTokenFile(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
    try:
        return Tokens(TokenFile.model_validate(tomllib.loads(path.read_text())))
    except ValidationError as error:
        # Without the values: somebody may have put a token where its hash belongs.
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in found["loc"]) or "file"
        message = found["msg"].removeprefix("Value error, ")
        if found["type"] == "tuple_type":
            message = f"must be tables that begin with [[{place}]] each"
        raise BadTokenFile(f"{path}: {place}: {message}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadTokenFile(f"{path}: is not TOML: {error}") from None
    except UnicodeDecodeError:
        raise BadTokenFile(f"{path}: is not UTF-8") from None
