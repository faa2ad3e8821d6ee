"""Round trip of a decode plan: from plan() in a scheduler to apply() of its result, through a simulated executor.

Both sides are what runs in service: the scheduler's core, codec and ZeroMQ session on uvloop, and a `paged-executor
--simulate` process. One plan is in flight at a time, so a round trip is all of encode, send, decode, check, compute (no
latency is simulated), encode, send, decode. plan() and apply() themselves are measured by scheduler_step.

Beside it, in the same run, what the machine takes for nothing but the way: as many bytes to a process that sends back
as many as a result has, over the same kind of sockets, without any of our code.

With --idle: the share of its time that an executor with steps of 5 ms waits for plans while 256 streams are delivered
over gRPC, with as many plans in flight as an executor lets be unless told otherwise, and with one.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import uvloop
import zmq

from benchmarks.serving.idle import idle_share
from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.link.codec import decode_result
from scheduler_svc.link.session import ExecutorSession, LinkOptions

PROMPT_TOKENS = (32, 96)
TOO_LONG_S = 120.0
IDLE_STREAMS = 256


async def round_trips_us(endpoint: str, num_rows: int, steps: int) -> list[float]:
    """µs of each of `steps` decode plans of `num_rows` rows."""
    chance = random.Random(0)
    context = zmq.Context()
    session = ExecutorSession(context, LinkOptions(endpoint, "benchmark", 10.0))
    try:
        _, lease = await session.attach()
        scheduler = Scheduler()
        scheduler.attach(lease)
        for i in range(num_rows):
            prompt = [chance.randint(300, 30_000) for _ in range(chance.randint(*PROMPT_TOKENS))]
            scheduler.submit(Sequence(f"r{i}", prompt, steps + 200))
        trips = RoundTrips(session, scheduler, num_rows, steps)
        trips.begin()
        return await asyncio.wait_for(trips.done, TOO_LONG_S)
    finally:
        session.say_goodbye()
        session.close()
        context.destroy()


class RoundTrips:
    """As the driver does it: a result is decoded and applied as it arrives, and the next plan sent at once."""

    def __init__(self, session: ExecutorSession, scheduler: Scheduler, num_rows: int, steps: int) -> None:
        self._session = session
        self._scheduler = scheduler
        self._num_rows = num_rows
        self._steps = steps
        self._times: list[float] = []
        self.done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        session.on_result = self._on_result

    def begin(self) -> None:
        plan = self._scheduler.plan()
        if plan is None:
            raise RuntimeError("nothing to plan: the sequences are too short for this many steps")
        self._counts = len(plan.rows) == self._num_rows and not plan.started
        self._began = time.perf_counter()
        self._session.send(plan)

    def _on_result(self, message: pb.StepResult) -> None:
        result = decode_result(message, [])
        ended = time.perf_counter()
        self._scheduler.apply(result)
        if self._counts:
            self._times.append(1e6 * (ended - self._began))
        if len(self._times) < self._steps:
            self.begin()
        else:
            self.done.set_result(self._times)


def bare_echo_us(num_rows: int, trips: int) -> float:
    """Median µs of a message as large as a decode plan of `num_rows` rows, and one as large as its result, over TCP."""
    plan, result = bytes(9 * num_rows + 100), 4 * num_rows + 50
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    echo = multiprocessing.get_context("spawn").Process(target=answer_all, args=(endpoint, result), daemon=True)
    echo.start()
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(endpoint)
    times = []
    for _ in range(trips):
        began = time.perf_counter()
        peer.send(plan)
        peer.recv()
        times.append(1e6 * (time.perf_counter() - began))
    context.destroy()
    echo.kill()
    return median(times)


def answer_all(endpoint: str, num_bytes: int) -> None:
    peers = zmq.Context().socket(zmq.ROUTER)
    peers.bind(endpoint)
    while True:
        peer, _ = peers.recv_multipart()
        peers.send_multipart([peer, bytes(num_bytes)])


@contextmanager
def simulated_executor(*flags: str) -> Iterator[str]:
    """The endpoint of a simulated executor that lives as long as the block."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "endpoint"
        where = ["--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(file), "--exit-with-parent"]
        command = [sys.executable, "-m", "executor_svc", "--simulate", "--log-level", "error", *where, *flags]
        process = subprocess.Popen(command)
        try:
            while not file.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the executor has ended with code {process.returncode}")
                time.sleep(0.01)
            yield file.read_text().strip()
        finally:
            process.terminate()
            process.wait()


def idle(as_json: bool) -> None:
    shares = [uvloop.run(idle_share(IDLE_STREAMS, *flags)) for flags in ((), ("--plans-in-flight", "1"))]
    figures = {"idle_share": round(shares[0], 4), "idle_share_depth_1": round(shares[1], 4)}
    if as_json:
        print(json.dumps(figures))
    else:
        print(f"the executor waits {shares[0]:.2%} of its time; with one plan in flight {shares[1]:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode")
    parser.add_argument("--steps", type=int, default=400, help="round trips")
    parser.add_argument("--idle", action="store_true", help="how long an executor waits for plans, instead")
    args = parser.parse_args()
    if args.idle:
        idle(args.json)
        return
    with simulated_executor("--num-blocks", "20000", "--max-rows", str(max(args.rows, 256))) as endpoint:
        times = sorted(uvloop.run(round_trips_us(endpoint, args.rows, args.steps)))
    figures = {
        "round_trip_us_p50": round(median(times), 1),
        "round_trip_us_p99": round(times[len(times) * 99 // 100], 1),
        "bare_echo_us_p50": round(bare_echo_us(args.rows, args.steps), 1),
    }
    if args.json:
        print(json.dumps(figures))
    else:
        print(
            f"{args.rows} rows: median {figures['round_trip_us_p50']} µs, p99 {figures['round_trip_us_p99']} µs; "
            f"the way alone {figures['bare_echo_us_p50']} µs"
        )


if __name__ == "__main__":
    main()
