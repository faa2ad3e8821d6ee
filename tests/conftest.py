"""What must hold before any test module is imported."""

import os
import signal
from collections.abc import Iterator

import grpc.aio
import pytest
import structlog

# Triton reads this when it is first imported, which transformers may do from any test: the kernels then run in its
# interpreter, for there need not be a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# gRPC's event loop engine ends with its last channel, and waits for what one that was collected with a call still open
# never ends: whichever test runs then would hang for ever. Tests hold it until the process ends.
grpc.aio.init_grpc_aio()


# A shell starts what is to run behind it with interrupts ignored, and whatever that starts ignores them, too: tests
# that interrupt a process would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logs_stay_as_they_are() -> Iterator[None]:
    """A test that configures logs in its own process silences what those after it look for, for loggers keep it."""
    before = structlog.get_config()
    yield
    assert structlog.get_config() == before
