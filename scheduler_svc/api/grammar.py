"""A request's grammar: what shows before it is compiled, and how it is handed to the engine."""

from itertools import islice

from paged.v1 import inference_pb2
from scheduler_svc.errors import FieldViolation
from scheduler_svc.text.grammars import Grammar

MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 1024
_MAX_NAMED = 16  # of a list: a thousand bad entries must not become a thousand sentences


def grammar_violations(request: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    """Sizes, and what is missing. Whether it can be compiled shows later."""
    grammar = grammar_of(request)
    if grammar is None:
        if request.HasField("grammar"):
            return [FieldViolation("grammar", "is empty; set one of json_schema, regex, choice and lark")]
        return []
    field = f"grammar.{grammar.kind}"
    if isinstance(grammar.source, str):
        if not grammar.source:
            return [FieldViolation(field, "is empty; a grammar needs something to allow")]
        return _size_violations(field, len(grammar.source.encode()))
    options = grammar.source
    if not 1 <= len(options) <= MAX_CHOICES:
        return [FieldViolation(f"{field}.options", f"has {len(options)} entries; must have 1 to {MAX_CHOICES}")]
    empty = (i for i, option in enumerate(options) if not option)
    return [
        *(FieldViolation(f"{field}.options[{i}]", "is empty; leave it out") for i in islice(empty, _MAX_NAMED)),
        *_size_violations(f"{field}.options", sum(len(option.encode()) for option in options)),
    ]


def grammar_of(request: inference_pb2.GenerateRequest) -> Grammar | None:
    """None where the request has none."""
    if not request.HasField("grammar"):
        return None
    match request.grammar.WhichOneof("kind"):
        case None:
            return None
        case "choice":
            return Grammar("choice", tuple(request.grammar.choice.options))
        case kind:
            return Grammar(kind, getattr(request.grammar, kind))


def _size_violations(field: str, num_bytes: int) -> list[FieldViolation]:
    if num_bytes > MAX_GRAMMAR_BYTES:
        return [FieldViolation(field, f"has {num_bytes} bytes, above the limit of {MAX_GRAMMAR_BYTES}")]
    return []
