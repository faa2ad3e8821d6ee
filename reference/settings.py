"""docs/settings.md: every setting of both services, as their classes say it."""

from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from executor_svc.settings import ExecutorSettings
from reference.markdown import cell, table
from scheduler_svc.settings import SchedulerSettings

SERVICES: dict[str, type[BaseSettings]] = {"paged-scheduler": SchedulerSettings, "paged-executor": ExecutorSettings}
# Units of numbers, by how their names end; those of the others by their whole names.
SUFFIXES = {
    "_s": "seconds",
    "_us": "microseconds",
    "_ns": "nanoseconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_tokens_per_step": "tokens",
    "_model_len": "tokens",
    "_requests": "requests",
    "_files": "files",
    "_grammars": "grammars",
    "_watchers": "callers",
    "_losses": "losses",
    "_calls": "calls",
    "_events": "events",
}
UNITS = {
    "block_size": "tokens",
    "cpu_threads": "threads",
    "kv_memory": "bytes",
    "max_logprobs": "tokens",
    "max_rows": "sequences",
    "max_samples": "samples",
    "memory_share": "share",
    "num_blocks": "blocks",
    "plans_in_flight": "plans",
    "simulate_eos_id": "a token id",
    "simulate_vocab_size": "token ids",
    "tokens_per_step": "tokens",
    "traces_share": "share",
    "watermark": "share",
}
HEAD = """# Settings

<!-- Made from the code by `make docs`; do not edit. -->

Every setting is a flag of its service, or an environment variable; a flag goes before the variable. A switch such as
`--reflection` is turned off by `--no-reflection`, or by `false` in the variable. Bad values end the service with code
2, which names the flag, the variable and the value.
"""
SETTING_TITLES = ["flag", "variable", "default", "value", "what it is"]


class UnknownUnit(Exception):
    """A number of the settings, of which this page does not know what it counts: add it to UNITS."""


def settings_page() -> str:
    """The page. Raises UnknownUnit."""
    parts = [HEAD]
    for command, settings in SERVICES.items():
        prefix = settings.model_config["env_prefix"]
        properties = settings.model_json_schema()["properties"]
        rows = [
            [
                f"`--{name.replace('_', '-')}`",
                f"`{prefix}{name.upper()}`",
                _default(field),
                _value(name, properties[name]),
                cell(field.description or ""),
            ]
            for name, field in settings.model_fields.items()
        ]
        parts.append(f"## {command}\n\n{cell((settings.__doc__ or '').strip())}\n\n{table(SETTING_TITLES, rows)}\n")
    return "\n".join(parts)


def _default(field: FieldInfo) -> str:
    value = field.get_default()
    if field.default_factory is not None:
        return "none" if field.annotation is not str else "made up"
    if value is None or value == "":
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return _number(value)
    return f"`{value}`"


def _value(name: str, schema: dict[str, Any]) -> str:
    """What is taken, in the unit that it is in."""
    choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
    (only,) = choices
    if "enum" in only:
        return ", ".join(f"`{word}`" for word in only["enum"])
    kind = only["type"]
    if kind == "boolean":
        return "on or off"
    if kind in ("integer", "number"):
        return ", ".join(filter(None, [_unit(name), _range(only)]))
    if kind == "object":
        return "names and numbers"
    return "path" if only.get("format") == "path" else "text"


def _unit(name: str) -> str:
    if name in UNITS:
        return UNITS[name]
    ends = [suffix for suffix in SUFFIXES if f"_{name}".endswith(suffix)]
    if not ends:
        raise UnknownUnit(f"{name}: has no unit that reference/settings.py knows")
    return SUFFIXES[max(ends, key=len)]


def _range(schema: dict[str, Any]) -> str:
    bounds = {"from": "minimum", "above": "exclusiveMinimum", "to": "maximum"}
    return " ".join(f"{word} {_number(schema[key])}" for word, key in bounds.items() if key in schema)


def _number(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:g}"
