"""What each tenant may have of this scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of one tenant; None means no limit besides those of all together. `weight` is its share in the order of
    admission, beside those of others."""

    max_requests: int | None = None  # that are live: running, waiting, or about to
    max_queued_tokens: int | None = None  # of its requests that wait for admission
    weight: float = 1.0


class Tenants:
    """The limits of all tenants, by name. Those that are not named have `default`."""

    def __init__(self, stated: Mapping[str, TenantLimits] | None = None, default: TenantLimits | None = None) -> None:
        self._stated = dict(stated or {})
        self._default = TenantLimits() if default is None else default
        self._limits = self._stated

    def limits(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant, self._default)

    def stated(self, tenant: str) -> TenantLimits:
        """What was stated at the start, or the default."""
        return self._stated.get(tenant, self._default)

    def replace(self, limits: Mapping[str, TenantLimits]) -> None:
        """These go before what was stated at the start, and void what was said here before. They hold for whatever is
        asked for from now on."""
        self._limits = {**self._stated, **limits}
