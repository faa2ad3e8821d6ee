"""Starts an executor: settings, model, socket, loop."""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from executor_svc import logs
from executor_svc.loaded import LoadedModel
from executor_svc.model_loading import load_model, with_torch
from executor_svc.process import (
    FollowerSignals,
    Stopper,
    die_with_parent,
    leave_at_once,
    write_whole,
)
from executor_svc.ranks import Ranks, RanksLost, RanksUnclear
from executor_svc.router import EndpointTaken, Guard, Router
from executor_svc.service import PROBE_S, Service
from executor_svc.settings import ExecutorSettings, parse, refuse
from paged.addresses import is_local_endpoint

if TYPE_CHECKING:
    from executor_svc.step_traces import StepTraces

BYTES_PER_TOKEN = 8  # that a started row takes in a plan: its id, and a block of one slot
LEADER_ENDS_S = 10.0  # its last step, and what it says at the end


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a stop, 1 after a failure; bad settings exit with 2."""
    settings = parse(sys.argv[1:] if arguments is None else arguments)
    ranks = _find_ranks(settings)
    logs.configure(settings.log_level, settings.log_format, **({"rank": ranks.rank} if ranks.size > 1 else {}))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where loading is interrupted
    if settings.exit_with_parent or ranks.size > 1:  # torchrun ends all when one does; without it nobody would
        die_with_parent(may_be_first=ranks.size > 1)  # a container's only command may well be torchrun
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
    traces = _traces(settings)
    try:
        # Before the model, whose loading may take minutes: who asks to attach waits in the socket.
        router = Router(
            settings.endpoint,
            max_message_bytes=settings.max_message_bytes,
            max_unread_messages=settings.plans_in_flight + 1,  # all else that a scheduler sends is small
            longest_wait_ms=round(PROBE_S * 1e3),
            guard=_guard(settings),
            ipc_mode=int(settings.ipc_mode, 8),
        )
    except EndpointTaken as error:
        structlog.get_logger().error("not_listening", reason=str(error))
        return 1
    try:
        model = load_model(settings, ranks)
        try:
            return _serve(settings, model, router, traces)
        finally:
            model.close()
    finally:
        router.close()


def _guard(settings: ExecutorSettings) -> Guard | None:
    if settings.curve_key_file is None or settings.curve_allowed_keys is None:
        return None
    from executor_svc.curve import CurveGuard  # brings asyncio, which nothing else here needs

    return CurveGuard(settings.curve_key_file, settings.curve_allowed_keys)


def _traces(settings: ExecutorSettings) -> "StepTraces | None":
    if settings.traces_endpoint is None:
        return None
    try:
        from executor_svc.step_traces import StepTraces, log_library_events
        from paged.tracing import tracer_provider
    except ModuleNotFoundError as error:
        refuse(f"--traces-endpoint: needs the extra tracing: {error}")
    log_library_events()
    return StepTraces(tracer_provider(settings.traces_endpoint, "paged-executor", share=0.0))


def _serve(settings: ExecutorSettings, model: LoadedModel, router: Router, traces: "StepTraces | None") -> int:
    log = structlog.get_logger()
    longest = model.facts.max_model_len * BYTES_PER_TOKEN
    if longest > settings.max_message_bytes:
        log.error("max_message_bytes_too_small", max_message_bytes=settings.max_message_bytes, needed=longest)
        return 1
    service = Service(settings, model, router, Stopper(), traces=traces)
    gc.freeze()  # what was made so far stays; no collection has to look at it again
    if settings.endpoint_file is not None:
        try:
            write_whole(settings.endpoint_file, router.endpoint)
        except OSError as error:
            log.error("endpoint_file_not_written", file=str(settings.endpoint_file), reason=error.strerror)
            return 1
    curve = settings.curve_key_file is not None
    if not curve and not is_local_endpoint(settings.endpoint):
        log.warning("listening_insecurely", endpoint=router.endpoint)
    if settings.metrics_address is not None and not _serve_metrics(service, model.facts.name, settings.metrics_address):
        return 1
    log.info("ready", endpoint=router.endpoint, curve=curve, model=model.facts.name, blocks=model.num_blocks - 1)
    return service.run()


def _serve_metrics(service: Service, model: str, address: str) -> bool:
    from executor_svc.metrics import serve_metrics

    try:
        serve_metrics(service, model, address)
    except (OSError, OverflowError) as error:  # the latter: no such port
        structlog.get_logger().error("metrics_not_served", address=address, reason=str(error))
        return False
    return True


def _follow(settings: ExecutorSettings, ranks: Ranks) -> int:
    """Serves with a share of the model, as rank 0 says."""
    signals, log = FollowerSignals(settings.shutdown_grace_s + LEADER_ENDS_S), structlog.get_logger()
    follower = with_torch(settings, lambda load: load.load_share(settings, ranks))
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


if __name__ == "__main__":
    sys.exit(main())
