"""Who reads the answers of one call: whether it waits for a message, and how much waits for it."""

import asyncio
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from scheduler_svc.answer import Answer


class Reader:
    """One coroutine waits at a time, in `turn`, until somebody says `wake`. While none does, the call's last message is
    on its way: the client has not taken it yet.

    `is_whole`: it wants nothing of an answer before its end. `unread_bytes`: of its answers, what is in no message yet;
    a whole answer does not count, since nobody could have read it.
    """

    __slots__ = ("_turn", "is_whole", "request_id", "unread_bytes")

    is_gathered: ClassVar[bool] = False  # what it reads leaves in a message with what others read

    def __init__(self, request_id: str, *, is_whole: bool) -> None:
        self.request_id = request_id
        self.is_whole = is_whole
        self.unread_bytes = 0
        self._turn: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._turn is not None

    def wake(self) -> None:
        """Harmless if nobody waits."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def takes(self, answer: "Answer") -> bool:
        """Whether it sees to what is new of the answer by itself, without a turn of the delivery's."""
        return False

    async def turn(self) -> None:
        """Until `wake`."""
        self._turn = asyncio.get_running_loop().create_future()
        try:
            await self._turn
        finally:
            self._turn = None
