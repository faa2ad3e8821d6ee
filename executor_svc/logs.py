"""How events become lines: structlog, on stderr."""

import logging
import sys
from typing import Literal

import structlog

# They warn of kernels for other machines, and of each other, where nobody has asked for either.
_WARN_OF_NOTHING = ("torchao", "torch.utils._pytree")


def configure(level: str, form: Literal["console", "json"], **keys: object) -> None:
    """Every event has a time, a level and keys, these among them. Call once, before the first event."""

    def add_keys(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**event, **keys}

    for name in _WARN_OF_NOTHING:
        logging.getLogger(name).setLevel(logging.ERROR)
    renderer: structlog.typing.Processor
    if form == "json":
        # Without what variables held: a step's are prompts.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors: list[structlog.typing.Processor] = [structlog.processors.ExceptionRenderer(tracebacks)]
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
            add_keys,
            *processors,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
