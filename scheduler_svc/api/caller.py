"""Who makes a call."""

from contextvars import ContextVar
from dataclasses import dataclass, field

from paged.roles import Role
from scheduler_svc.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is its token's, for logs, and `digest` its hash; nobody who came without one has any. Without a `tenant`
    its requests may be anybody's."""

    name: str
    roles: frozenset[Role]
    tenant: str | None = None
    digest: bytes = field(default=b"", repr=False)

    def tenant_of(self, named: str) -> str:
        """Whose request it is, of one that names this tenant, or none. Raises PermissionDenied."""
        if self.tenant is None:
            return named
        if named and named != self.tenant:
            raise PermissionDenied(f"tenant: is not the token's own, {self.tenant!r}; leave it unset")
        return self.tenant


# Where nobody is asked who they are.
ANYBODY = Caller("", frozenset(Role))

# Of the call that is being handled. It has no default: a call that nobody has let in cannot pass for anybody's.
CALLER: ContextVar[Caller] = ContextVar("caller")
