"""How events become lines: structlog, on stderr."""

import logging
import sys
from typing import Literal

import structlog


def configure(level: str, form: Literal["console", "json"]) -> None:
    """Every event has a time, a level and keys. Call once, before the first event."""
    renderer: structlog.typing.Processor
    if form == "json":
        processors: list[structlog.typing.Processor] = [structlog.processors.dict_tracebacks]
        renderer = structlog.processors.JSONRenderer()
    else:
        processors = []
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *processors,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
