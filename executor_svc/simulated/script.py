"""What a simulated model is told to say and to suffer, as a JSON file:

    {"replies": [{"prompt": [1, 2], "output": [7, 8, 9]}],
     "faults": [{"step": 12, "kind": "raise"},
                {"row_of_prompt": [1, 2], "kind": "not_finite"}]}

A reply gives the ids that follow exactly this prompt, before the hash takes over. A fault happens in the step of that
number (runs of the model, counted from 1 since the process began), in every step that computes a row of that prompt,
or, with both given, in that step if it computes such a row.

Kinds: `raise` fails the step; `hang` never comes back; `exit` ends the process at once with code 1;
`not_finite` gives -1 for the rows of that prompt, or for all rows where none is named.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator


class ScriptError(Exception):
    """The script cannot be used. Names the file, the entry and what is wrong."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(_Entry):
    prompt: tuple[NonNegativeInt, ...]
    output: tuple[NonNegativeInt, ...]


class ScriptedFault(_Entry):
    kind: Literal["raise", "hang", "exit", "not_finite"]
    step: PositiveInt | None = None
    row_of_prompt: tuple[NonNegativeInt, ...] | None = None

    @model_validator(mode="after")
    def _has_a_moment(self) -> "ScriptedFault":
        if self.step is None and self.row_of_prompt is None:
            raise ValueError("give step, row_of_prompt, or both")
        return self


class Script(_Entry):
    replies: tuple[Reply, ...] = ()
    faults: tuple[ScriptedFault, ...] = ()


def read_script(path: Path, vocab_size: int) -> Script:
    """Raises ScriptError."""
    try:
        script = Script.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ScriptError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ScriptError(f"{path}: {place or 'file'}: {first['msg']}") from error
    for number, reply in enumerate(script.replies):
        if max(reply.output, default=0) >= vocab_size:
            raise ScriptError(f"{path}: replies.{number}.output: id {max(reply.output)} must be below {vocab_size}")
    return script
