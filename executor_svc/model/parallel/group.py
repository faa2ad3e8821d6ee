"""The processes of one executor as a group: what they agree on, and what rank 0 tells the others.

Nothing here waits without a bound for a rank that is at work. Only the others' wait for rank 0's next word has none,
since that may come in a minute or in a week; it ends when rank 0 does, whose connections then break.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from executor_svc.model.refusal import ModelRefused, reason
from executor_svc.ranks import Ranks

LOADING_TIMEOUT = timedelta(hours=1)  # reading the weights takes minutes, and not equally many on all machines
MEETING_TIMEOUT = timedelta(minutes=5)
_EVER = timedelta(days=3650)


class Group(Protocol):
    """What loading and running need of the other ranks; with one rank only, nothing."""

    ranks: Ranks

    def wait_for_all(self) -> None:
        """Until all ranks have come here, while they load."""

    def first_here(self) -> contextlib.AbstractContextManager[None]:
        """What is inside, one process of each machine does first; it may leave files that the others find."""

    def least(self, value: int) -> int:
        """The least of all ranks' values."""

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in all ranks' tensors."""


class Alone:
    """The group of a process without others."""

    ranks = Ranks()

    def wait_for_all(self) -> None:
        pass

    def first_here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def least(self, value: int) -> int:
        return value

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        return values


ALONE = Alone()


class ProcessGroup:
    """Several processes: nccl between GPUs, gloo between CPUs, and gloo for what rank 0 tells the others."""

    def __init__(self, ranks: Ranks, device: torch.device, timeout_s: float) -> None:
        """Meets the other ranks where torchrun says. Raises ModelRefused."""
        self.ranks = ranks
        timeout = timedelta(seconds=timeout_s)
        on_gpu = device.type == "cuda"
        try:
            if on_gpu:
                torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=_meeting_place(ranks),
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=timeout,
                device_id=device if on_gpu else None,
            )
            # Each rank's own timeout holds for its own waiting.
            self._control = dist.new_group(backend="gloo", timeout=_EVER if ranks.rank else timeout)
        except (RuntimeError, ValueError) as error:
            raise ModelRefused(
                f"rank {ranks.rank} of {ranks.size} does not find the others: {reason(error)}; "
                "start all with one torchrun command"
            ) from error

    def wait_for_all(self) -> None:
        """Raises ModelRefused where one has ended."""
        try:
            dist.monitored_barrier(self._control, timeout=LOADING_TIMEOUT)
        except RuntimeError as error:
            raise ModelRefused(
                f"rank {self.ranks.rank} is ready to go on, but another one is gone; its log says why ({reason(error)})"
            ) from error

    @contextlib.contextmanager
    def first_here(self) -> Iterator[None]:
        if self.ranks.local_rank == 0:
            yield
            self.wait_for_all()
        else:
            self.wait_for_all()
            yield

    def least(self, value: int) -> int:
        self.wait_for_all()
        least = torch.tensor([value])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._control)
        return int(least)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        dist.broadcast(values, 0)
        return values

    def tell(self, message: bytes) -> None:
        """From rank 0 to all others."""
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(content)]), 0, group=self._control)
        dist.broadcast(content, 0, group=self._control)

    def hear(self) -> NDArray[np.uint8]:
        """What rank 0 tells next."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._control)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self._control)
        return content.numpy()

    def close(self) -> None:
        """Once all ranks have nothing more to say."""
        dist.destroy_process_group()


def _meeting_place(ranks: Ranks) -> Store:
    """torchrun's store; but it still has the addresses of ranks that ended, and those that are started anew would call
    them."""
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.size, timeout=MEETING_TIMEOUT))
    return PrefixStore(f"attempt {ranks.attempt}", store)
