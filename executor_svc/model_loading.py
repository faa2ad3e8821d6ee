"""Loads what the settings name, with only as much as that needs: torch is not imported for the simulated model."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import structlog

from executor_svc import imports
from executor_svc.loaded import LoadedModel
from executor_svc.model.refusal import ModelRefused
from executor_svc.process import keep_freed_memory, let_threads_sleep
from executor_svc.ranks import Ranks
from executor_svc.settings import ExecutorSettings, refuse

_T = TypeVar("_T")


def load_model(settings: ExecutorSettings, ranks: Ranks) -> LoadedModel:
    """Ends the process with code 1 where the model cannot be served, with code 2 for a bad script."""
    if not settings.simulate:
        return with_torch(settings, lambda load: load.load(settings, ranks))
    from executor_svc.simulated.load import load_simulated
    from executor_svc.simulated.script import ScriptError

    try:
        return load_simulated(settings)
    except ScriptError as error:
        refuse(f"--simulate-script: {error}")


def with_torch(settings: ExecutorSettings, call: Callable[[ModuleType], _T]) -> _T:
    """What `call` makes of the module that loads models. Ends the process with code 1 where that cannot be."""
    let_threads_sleep()
    imports.leave_out_torchao(settings.model or "", trust_remote_code=settings.trust_remote_code)
    try:
        with imports.for_good():
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
