"""Compiles grammars in a process of its own, where one that takes too long, or too much memory, can be ended.

    python -m scheduler_svc.text.grammar_worker

reads a line of JSON for each grammar, `{"kind": ..., "source": ..., "limit_s": ...}`, and writes one, `{"error": ...}`,
null where it can be used. It dies of SIGPROF over one that takes more than `limit_s` of a CPU. What costs time in a
grammar does so with any vocabulary, and here it is one of bytes.
"""

import json
import resource
import signal
import sys
from typing import Any, ClassVar

import llguidance

from scheduler_svc.parent import exit_with_parent

MAX_MEMORY_BYTES = 1 << 30
MAX_STACK_BYTES = 1 << 20  # less than any thread has that compiles the same again: what is too deep ends here
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # between the tokens of JSON; without a bound, a model may go on for ever


def limits() -> llguidance.LLParserLimits:
    """What bounds a grammar's compilation, and the masks made by it; the library's own where not named."""
    return llguidance.LLParserLimits(
        step_max_items=20_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
    )


def grammar_of(kind: str, source: Any) -> str:
    """The library's own form; kinds are those of `Grammar` in inference.proto. Raises ValueError."""
    matcher = llguidance.LLMatcher
    match kind:
        case "json_schema":
            return matcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": WHITE_SPACE})
        case "regex":
            return matcher.grammar_from_regex(source)
        case "choice":
            return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, source)))
        case "lark":
            return matcher.grammar_from_lark(source)
    raise ValueError(f"no kind of grammar: {kind}")


class _Bytes:
    """A vocabulary of single bytes, as llguidance wants to see one: whatever can be written at all can be with it."""

    eos_token_id = 256
    bos_token_id = None
    tokens: ClassVar[list[bytes]] = [*(bytes([byte]) for byte in range(256)), b"\xff<end of the text>"]
    special_token_ids: ClassVar[list[int]] = [256]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def problem_with(kind: str, source: Any, tokenizer: llguidance.LLTokenizer) -> str | None:
    """What is wrong with a grammar; None where it compiles and allows a text."""
    try:
        matcher = llguidance.LLMatcher(tokenizer, grammar_of(kind, source), log_level=0, limits=limits())
    except ValueError as error:
        return str(error)
    if matcher.is_error():
        return matcher.get_error()
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return "nothing can satisfy it"
    return None if any(mask[:32]) else "it allows nothing but the empty text"


def main() -> None:
    exit_with_parent()  # one that compiles does not see that its pipe has ended
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    for line in sys.stdin:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["limit_s"])
        error = problem_with(job["kind"], job["source"], tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()
