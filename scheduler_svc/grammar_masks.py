"""Gives each answer that has a grammar the mask for its next token: at its begin, and after each of its tokens."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from scheduler_svc.answer import Answer
from scheduler_svc.core.scheduler import scheduler_of
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.token_rules import NO_RULES
from scheduler_svc.errors import FieldViolation, InvalidRequest, PagedError, RequestFailed, Unavailable
from scheduler_svc.grammar_queue import GrammarQueue
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.text.grammar_check import GrammarCheck, Starved, to_its_end
from scheduler_svc.text.grammars import Grammar, Grammars, GrammarStuck, Matcher, NotAllowed, UnusableGrammar

MAX_LINE = 300  # letters that are told of a complaint
_REASON = "error: "
SLICE_S = 0.002  # of the event loop for masks before the next plan is made; who comes later is in a later plan


class GrammarMasks:
    """`fail` ends the request of a sequence with an error. `on_late` is called of those whose masks come after the plan
    that followed their tokens; they may have ended instead, where their grammars allow no more."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        fail: Callable[[Sequence, PagedError], None],
        on_late: Callable[[Sequence], None],
    ) -> None:
        self._check = GrammarCheck(settings.max_grammar_s)
        self._queue = GrammarQueue(self._compile, settings.max_waiting_grammars, settings.max_tenant_waiting_grammars)
        self._fail, self._on_late = fail, on_late
        self._waiting: deque[Sequence] = deque()  # for their masks
        self._later: asyncio.Handle | None = None  # the next slice, where some wait for one
        self._has_any = False  # until the first grammar, nobody is looked at

    def close(self) -> None:
        self._queue.close()
        self._check.close()

    async def begin(self, grammar: Grammar, answers: tuple[Answer, ...], grammars: Grammars) -> None:
        """Bind answers that are not submitted yet to the grammar; `grammars` are those of their model. Raises
        InvalidRequest, QueueFull, Unavailable."""
        first = answers[0].sequence
        try:
            if not grammars.knows(grammar):
                await self._queue.compiled(first.tenant, grammars, grammar)
            matcher, mask = await asyncio.to_thread(_begun, grammars, grammar, first.end_token_ids)
        except (UnusableGrammar, GrammarStuck) as error:
            raise _refused(grammar, str(error)) from error
        except Starved as error:
            raise Unavailable(f"the grammar could not be compiled: {error}; try again") from error
        _check_rules(first, grammar, mask)
        self._has_any = True
        for answer in answers:
            answer.matcher = matcher.copy()
            answer.sequence.masked = True
            scheduler_of(answer.sequence).allow(answer.sequence, mask)

    async def _compile(self, grammars: Grammars, grammar: Grammar) -> None:
        """In its turn: those who wait for one take no threads from others. Raises UnusableGrammar, Starved."""
        if grammars.knows(grammar):  # from another tenant's turn
            return
        if (problem := await self._check.problem_with(grammar)) is not None:
            raise UnusableGrammar(problem)
        await to_its_end(asyncio.to_thread(grammars.compile, grammar))

    def on_tokens(self, updated: Iterable[Sequence]) -> None:
        """These have got tokens. Masks that cannot be made in a slice of time are made after the next plan."""
        if self._has_any:
            self._waiting.extend(sequence for sequence in updated if sequence.needs_mask)
            if self._later is None:  # else these are behind others, which have a slice of their own in each turn
                self._give()

    def _give(self) -> list[Sequence]:
        """Returns those that have got their masks."""
        given, end = [], time.perf_counter() + SLICE_S
        while self._waiting:
            sequence = self._waiting.popleft()
            if sequence.needs_mask and sequence.state is not State.ENDED:
                self._give_one(sequence)
                given.append(sequence)
            if self._waiting and time.perf_counter() > end:
                self._later = asyncio.get_running_loop().call_soon(self._give_later)
                break
        return given

    def _give_later(self) -> None:
        self._later = None
        for sequence in self._give():
            self._on_late(sequence)

    def _give_one(self, sequence: Sequence) -> None:
        answer: Answer = sequence.owner
        try:
            mask = answer.follow_grammar()
            if mask is None:
                scheduler_of(sequence).complete(sequence)
            else:
                _check_rules(sequence, answer.grammar, mask)
                scheduler_of(sequence).allow(sequence, mask)
        except GrammarStuck as error:
            self._fail(sequence, _refused(answer.grammar, f"leads no further: {error}"))
        except InvalidRequest as error:
            self._fail(sequence, error)
        except NotAllowed as error:
            self._fail(sequence, RequestFailed(f"a token was drawn that was not allowed: {_one_line(str(error))}"))


def _begun(grammars: Grammars, grammar: Grammar, end_token_ids: tuple[int, ...]) -> tuple[Matcher, bytes]:
    """A matcher at the beginning, and its first mask. Raises UnusableGrammar, GrammarStuck."""
    matcher = grammars.matcher(grammar, end_token_ids)
    mask = matcher.follow(())
    if mask is None:
        raise UnusableGrammar("it allows nothing but the empty text")
    return matcher, mask


def _check_rules(sequence: Sequence, grammar: Grammar, mask: bytes) -> None:
    """Raises InvalidRequest where rules about single tokens leave nothing of what the grammar allows next."""
    rules, num_output = sequence.sampling.rules, sequence.num_output
    if rules == NO_RULES:
        return
    held_back = sequence.end_token_ids if num_output < sequence.sampling.min_tokens else ()
    if not rules.leave_any_of(mask, sequence.token_ids, held_back):
        found = f"after {num_output} tokens of output it allows none that the request's rules about tokens leave"
        raise _refused(grammar, f"{found}: allowed_token_ids, bad_words, bad_token_sequences, min_tokens")


def _refused(grammar: Grammar, problem: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(f"grammar.{grammar.kind}", _one_line(problem)))


def _one_line(text: str) -> str:
    """The library's complaints draw pictures below their first line; what is wrong with a regex comes after those, and
    is told first here, as the first line may quote the whole grammar."""
    first, *others = text.strip().splitlines() or [""]
    reason = next((line.removeprefix(_REASON) for line in others if line.startswith(_REASON)), None)
    line = first if reason is None else f"{reason}; {first.rstrip(':')}"
    return line[:MAX_LINE]
