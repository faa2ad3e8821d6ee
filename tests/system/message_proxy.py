"""A way between schedulers and an executor on which single messages can be lost, doubled or swapped, which TCP alone
never does."""

import threading
from collections import Counter, deque
from typing import Literal, Self

import zmq

from paged.v1.executor_pb2 import ToExecutor, ToScheduler

Mishap = Literal["lost", "doubled", "swapped"]


class MessageProxy:
    """Takes sessions at `endpoint` and carries each on over a connection of its own. Use as a context manager.

    `suffer` names what the next message of a kind (a field of ToExecutor or ToScheduler) is to meet; one that is
    swapped waits for the next of its kind and way.
    """

    def __init__(self, executor: str) -> None:
        self._executor = executor
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind("tcp://127.0.0.1:0")
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._onward: dict[bytes, zmq.Socket] = {}
        self._mishaps: deque[tuple[str, Mishap]] = deque()
        self._held: dict[tuple[bytes, str], bytes] = {}
        self.num_suffered = 0
        self.num_carried: Counter[str] = Counter()  # messages that came, by kind
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def suffer(self, kind: str, mishap: Mishap) -> None:
        self._mishaps.append((kind, mishap))

    def _carry(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        while not self._stopped.is_set():
            for socket, _ in poller.poll(20):
                if socket is self._router:
                    peer, data = self._router.recv_multipart()
                    if peer not in self._onward:
                        self._onward[peer] = onward = self._context.socket(zmq.DEALER)
                        onward.connect(self._executor)
                        poller.register(onward, zmq.POLLIN)
                    for message in self._suffered(peer, str(ToExecutor.FromString(data).WhichOneof("message")), data):
                        self._onward[peer].send(message)
                else:
                    peer = next(peer for peer, onward in self._onward.items() if onward is socket)
                    data = socket.recv()
                    for message in self._suffered(peer, str(ToScheduler.FromString(data).WhichOneof("message")), data):
                        self._router.send_multipart([peer, message])

    def _suffered(self, peer: bytes, kind: str, data: bytes) -> list[bytes]:
        """What goes on of a message, and of what was held back."""
        self.num_carried[kind] += 1
        held = self._held.pop((peer, kind), None)
        if held is not None:
            return [data, held]
        if not self._mishaps or self._mishaps[0][0] != kind:
            return [data]
        _, mishap = self._mishaps.popleft()
        self.num_suffered += 1
        if mishap == "swapped":
            self._held[peer, kind] = data
        return {"lost": [], "doubled": [data, data], "swapped": []}[mishap]
