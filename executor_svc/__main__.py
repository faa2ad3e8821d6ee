"""Starts an executor: settings, model, socket, loop."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

import structlog

from executor_svc import logs
from executor_svc.loaded import LoadedModel
from executor_svc.model.refusal import ModelRefused
from executor_svc.process import (
    FollowerSignals,
    Stopper,
    die_with_parent,
    keep_freed_memory,
    leave_at_once,
    write_whole,
)
from executor_svc.ranks import Ranks, RanksLost, RanksUnclear
from executor_svc.router import EndpointTaken, Router
from executor_svc.service import PROBE_S, Service
from executor_svc.settings import ExecutorSettings, parse, refuse

BYTES_PER_TOKEN = 8  # that a started row takes in a plan: its id, and a block of one slot
_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a stop, 1 after a failure; bad settings exit with 2."""
    settings = parse(sys.argv[1:] if arguments is None else arguments)
    ranks = _find_ranks(settings)
    logs.configure(settings.log_level, settings.log_format, **({"rank": ranks.rank} if ranks.size > 1 else {}))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where loading is interrupted
    if settings.exit_with_parent or ranks.size > 1:  # torchrun ends all when one does; without it nobody would
        die_with_parent()
    if ranks.size == 1:
        return _lead(settings, ranks)
    try:
        code = _follow(settings, ranks) if ranks.rank else _lead(settings, ranks)
    except SystemExit as end:
        code = int(end.code or 0)
    if code:
        leave_at_once(code)  # the others see it by their broken connections
    return code


def _find_ranks(settings: ExecutorSettings) -> Ranks:
    try:
        ranks = Ranks.of_environment(os.environ)
    except RanksUnclear as error:
        refuse(str(error))
    if settings.simulate and ranks.size > 1:
        refuse(f"--simulate: the simulated model is not spread over {ranks.size} processes; start it without torchrun")
    return ranks


def _lead(settings: ExecutorSettings, ranks: Ranks) -> int:
    try:
        # Before the model, whose loading may take minutes: who asks to attach waits in the socket.
        router = Router(
            settings.endpoint, max_message_bytes=settings.max_message_bytes, longest_wait_ms=round(PROBE_S * 1e3)
        )
    except EndpointTaken as error:
        structlog.get_logger().error("not_listening", reason=str(error))
        return 1
    try:
        model = _load(settings, ranks)
        try:
            return _serve(settings, model, router)
        finally:
            model.close()
    finally:
        router.close()


def _serve(settings: ExecutorSettings, model: LoadedModel, router: Router) -> int:
    log = structlog.get_logger()
    longest = model.facts.max_model_len * BYTES_PER_TOKEN
    if longest > settings.max_message_bytes:
        log.error("max_message_bytes_too_small", max_message_bytes=settings.max_message_bytes, needed=longest)
        return 1
    service = Service(settings, model, router, Stopper())
    gc.freeze()  # what was made so far stays; no collection has to look at it again
    if settings.endpoint_file is not None:
        try:
            write_whole(settings.endpoint_file, router.endpoint)
        except OSError as error:
            log.error("endpoint_file_not_written", file=str(settings.endpoint_file), reason=error.strerror)
            return 1
    if not router.endpoint.startswith(("ipc://", "tcp://127.", "tcp://[::1]", "tcp://localhost")):
        log.warning("listening_without_authentication", endpoint=router.endpoint)
    log.info("ready", endpoint=router.endpoint, model=model.facts.name, blocks=model.num_blocks - 1)
    return service.run()


def _follow(settings: ExecutorSettings, ranks: Ranks) -> int:
    """Serves with a share of the model, as rank 0 says."""
    signals, log = FollowerSignals(), structlog.get_logger()
    follower = _loaded(lambda load: load.load_share(settings, ranks))
    signals.following = True
    log.info("following")
    try:
        follower.follow()
    except RanksLost as error:
        log.error("rank_failed", reason=str(error))
        return 1
    except Exception as error:
        log.exception("rank_failed", reason=str(error))
        return 1
    log.info("stopped")
    return 0


def _load(settings: ExecutorSettings, ranks: Ranks) -> LoadedModel:
    if not settings.simulate:
        return _loaded(lambda load: load.load(settings, ranks))
    from executor_svc.simulated.load import load_simulated
    from executor_svc.simulated.script import ScriptError

    try:
        return load_simulated(settings)
    except ScriptError as error:
        refuse(f"--simulate-script: {error}")


def _loaded(call: Callable[[ModuleType], _T]) -> _T:
    """What `call` makes of the module that loads models. Ends the process with code 1 where that cannot be."""
    try:
        # Brings torch, which the simulated executor does without.
        from executor_svc.model import load
        from executor_svc.model.denormals import flush_denormals
    except ModuleNotFoundError as error:
        needed = "pip install 'paged-inference[executor]'"
        structlog.get_logger().error("package_missing", package=error.name, needed=needed)
        sys.exit(1)
    flush_denormals()
    try:
        loaded = call(load)
    except ModelRefused as error:
        structlog.get_logger().error("model_refused", reason=str(error))
        sys.exit(1)
    keep_freed_memory()
    return loaded


if __name__ == "__main__":
    sys.exit(main())
