"""Sections that cannot harm each other: each runs in a process of its own, with a time of its own.

An illegal access on a GPU leaves its whole process unable to use it, and a kernel that never ends cannot be called
back. So a section's figures are sent as they are found, and a process that dies or outstays its time loses only what
it had not found yet.
"""

import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from executor_svc.process import die_with_parent

SOFT_SHARE = 0.8  # of a section's time, after which it begins nothing new
LEAVING_S = 20.0  # for a process to end, after all is said
LONGEST_ERROR = 600  # characters


@dataclass(frozen=True, slots=True)
class Machine:
    """What is checked, and how large. `tiny` sizes are for a CPU, where only the code is proved, never a speed."""

    device: str
    models: tuple[str, ...] = ()
    layers: int = 2

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Section:
    """A module of this package with a function `measure(machine, report)`, and the seconds it may take."""

    name: str
    budget_s: float


@dataclass(slots=True)
class Outcome:
    """`figures` by name, as far as the section got; it passed if `errors` is empty."""

    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class Report:
    """What a section finds, given on at once."""

    def __init__(self, connection: Connection, budget_s: float) -> None:
        self._connection = connection
        self._soft_end = time.monotonic() + SOFT_SHARE * budget_s

    def add(self, **figures: Any) -> None:
        """Numbers, texts, or lists and dicts of them."""
        self._connection.send_bytes(json.dumps({"figures": as_json(figures)}).encode())

    def fail(self, error: str) -> None:
        """Something is wrong; the section goes on."""
        self._connection.send_bytes(json.dumps({"error": error[:LONGEST_ERROR]}).encode())

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Add what the work returns under that name. If it raises, that is wrong, and the section goes on."""
        if self.time_is_up:
            self.add(**{name: "no time"})
            return
        try:
            self.add(**{name: work()})
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this piece's result
            traceback.print_exc(file=sys.stderr)
            self.fail(f"{name}: {type(error).__name__}: {error}")

    @property
    def time_is_up(self) -> bool:
        """Whether it is late to begin anything new."""
        return time.monotonic() > self._soft_end


def as_json(value: Any) -> Any:
    """JSON has no number for what is not finite: it becomes a text."""
    if isinstance(value, dict):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def process_context(machine: Machine) -> Any:
    """How processes begin: a GPU cannot be used on both sides of a fork; on a CPU a fork saves the imports."""
    return multiprocessing.get_context("fork" if machine.tiny else "spawn")


def run_section(section: Section, machine: Machine, package: str = __package__) -> Outcome:
    """Run it to its end, or to the end of its time."""
    context = process_context(machine)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(f"{package}.{section.name}", machine, section.budget_s, sender))
    began = time.monotonic()
    process.start()
    sender.close()
    outcome = Outcome()
    try:
        ended = _receive(receiver, outcome, began + section.budget_s)
        if not ended:
            outcome.errors.append(f"took longer than {section.budget_s:.0f} s, and was ended")
        process.join(LEAVING_S if ended else 0)
    finally:
        _end(process)
    if ended and process.exitcode != 0:
        outcome.errors.append(f"its process ended with code {process.exitcode}")
    outcome.seconds = time.monotonic() - began
    return outcome


def _receive(receiver: Connection, outcome: Outcome, end: float) -> bool:
    """Take what the section reports. Whether it came to its end in time."""
    while receiver.poll(max(0.0, end - time.monotonic())):
        try:
            message = json.loads(receiver.recv_bytes())
        except EOFError:
            return True
        outcome.figures |= message.get("figures", {})
        outcome.errors += [message["error"]] if "error" in message else []
    return False


def _end(process: Any) -> None:
    """The section and whatever processes it has started are gone afterwards."""
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()  # it has not come to make a group of its own
        process.join()


def _child(module: str, machine: Machine, budget_s: float, connection: Connection) -> None:
    os.setsid()  # so that its own processes can be ended with it
    if os.getppid() > 1:  # a container's first process is nobody who could have died already
        die_with_parent()
    os.dup2(2, 1)  # what anybody prints must not stand between the figures
    report = Report(connection, budget_s)
    try:
        importlib.import_module(module).measure(machine, report)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this section's result
        traceback.print_exc(file=sys.stderr)
        report.fail(f"{type(error).__name__}: {error}")
    connection.close()
