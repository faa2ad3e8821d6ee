"""All that is measured of real processes for a simulation; what is kept in a file need not be measured again."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.capacity.costs import SchedulerCosts, TaskCosts
from benchmarks.capacity.latency import StepLatency


class PiecesFileError(Exception):
    """A file that holds no pieces; the text says why."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """How long a model's steps take, what a scheduler's work costs, and how far the simulation was from real processes
    (`validation.validated`)."""

    latency: StepLatency
    costs: SchedulerCosts
    validation: list[dict[str, Any]]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises PiecesFileError."""
        try:
            kept = json.loads(path.read_text())
            costs = {**kept["costs"]}
            for name in ("loop", "process"):
                costs[name] = TaskCosts(**costs[name])
            return cls(StepLatency(**kept["latency"]), SchedulerCosts(**costs), kept["validation"])
        except OSError as error:
            raise PiecesFileError(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise PiecesFileError(f"{path}: not what --save has written: {error!r}") from error
