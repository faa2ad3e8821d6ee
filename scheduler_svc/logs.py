"""How the scheduler logs: structlog events with keys, to standard error."""

import logging
import sys
from typing import Literal

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logs(level: str = "info", form: Literal["auto", "console", "json"] = "auto") -> None:
    """Send events of `level` and above to standard error, also those of libraries that use `logging`.

    `form` auto is console (for people) on a terminal and one JSON object a line elsewhere.
    """
    for_people = form == "console" or (form == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Plain: the default formatter prints local variables, and with them prompts.
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    rendered: list[structlog.typing.Processor] = (
        [console] if for_people else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=shared + rendered,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _route_library_logs(shared, rendered)


def _route_library_logs(shared: list[structlog.typing.Processor], rendered: list[structlog.typing.Processor]) -> None:
    # Libraries log at warning and above only: at info, some print what they carry.
    handler = logging.StreamHandler(sys.stderr)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, *rendered])
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
