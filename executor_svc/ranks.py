"""Which of an executor's processes this is. torchrun starts several, one for each share of the model."""

from collections.abc import Mapping
from dataclasses import dataclass


class RanksUnclear(ValueError):
    """The environment does not say which process this is."""


class RanksLost(RuntimeError):
    """The ranks are no longer in one state, or some are gone: this executor is lost."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Process `rank` of `size`, and of the `local_size` on this machine number `local_rank`; started anew by torchrun
    `attempt` times."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Ranks":
        """As torchrun tells it; a process that was started by nobody of the kind is alone. Raises RanksUnclear."""
        if environment.get("WORLD_SIZE", "1") == "1":
            return ONE
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            rank, size, local_rank, local_size = (int(environment[name]) for name in names)
            ranks = cls(rank, size, local_rank, local_size, int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")))
        except (KeyError, ValueError) as error:
            raise RanksUnclear(
                f"WORLD_SIZE is {environment['WORLD_SIZE']!r}, but {' or '.join(names)} is missing or no number; "
                "start several processes with torchrun"
            ) from error
        if not (0 <= ranks.local_rank < ranks.local_size <= ranks.size and ranks.local_rank <= ranks.rank < ranks.size):
            raise RanksUnclear(f"{ranks} is no process of a group; start several processes with torchrun")
        return ranks


ONE = Ranks()
