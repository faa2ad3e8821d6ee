"""Starts an executor: settings, model, socket, loop."""

import gc
import signal
import sys
from collections.abc import Sequence

import structlog

from executor_svc import logs
from executor_svc.loaded import LoadedModel
from executor_svc.process import Stopper, die_with_parent, write_whole
from executor_svc.router import EndpointTaken, Router
from executor_svc.service import PROBE_S, Service
from executor_svc.settings import ExecutorSettings, parse, refuse

BYTES_PER_TOKEN = 8  # that a started row takes in a plan: its id, and a block of one slot


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a stop, 1 after a failure; bad settings exit with 2."""
    settings = parse(sys.argv[1:] if arguments is None else arguments)
    logs.configure(settings.log_level, settings.log_format)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where loading is interrupted
    if settings.exit_with_parent:
        die_with_parent()
    try:
        # Before the model, whose loading may take minutes: who asks to attach waits in the socket.
        router = Router(
            settings.endpoint, max_message_bytes=settings.max_message_bytes, longest_wait_ms=round(PROBE_S * 1e3)
        )
    except EndpointTaken as error:
        structlog.get_logger().error("not_listening", reason=str(error))
        return 1
    try:
        return _serve(settings, router)
    finally:
        router.close()


def _serve(settings: ExecutorSettings, router: Router) -> int:
    log = structlog.get_logger()
    model = _load(settings)
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


def _load(settings: ExecutorSettings) -> LoadedModel:
    if settings.simulate:
        from executor_svc.simulated.load import load_simulated
        from executor_svc.simulated.script import ScriptError

        try:
            return load_simulated(settings)
        except ScriptError as error:
            refuse(f"--simulate-script: {error}")
    try:
        from executor_svc.model.load import load  # brings torch, which the simulated executor does without
        from executor_svc.model.refusal import ModelRefused
    except ModuleNotFoundError as error:
        needed = "pip install 'paged-inference[executor]'"
        structlog.get_logger().error("package_missing", package=error.name, needed=needed)
        sys.exit(1)
    try:
        return load(settings)
    except ModelRefused as error:
        structlog.get_logger().error("model_refused", reason=str(error))
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
