"""One answer on its way back to its client: from the tokens that the core appends to text that may be sent."""

from typing import Literal

from scheduler_svc.core.sequence import EndReason, Sequence
from scheduler_svc.errors import DeadlineExceeded, PagedError, RequestAborted, RequestFailed
from scheduler_svc.preface import Preface
from scheduler_svc.reader import Reader
from scheduler_svc.requests import Delta, Finish, PlainDelta, Usage
from scheduler_svc.text.grammars import Grammar, Matcher
from scheduler_svc.text.text_stream import TextStream

Outcome = Literal["finished", "cancelled", "failed"]
MAX_DELTA_TOKENS = 1024  # with the most log-probabilities some 300 kB: a reader that was slow gets several messages
TOKEN_BYTES = 40  # an integer in a list
LOGPROBS_BYTES, ALTERNATIVE_BYTES = 250, 70  # of a token, and of each alternative to it


class Answer:
    """`take` reads what is new in the sequence; whatever waits then leaves as one delta.

    Ends once, by `take` (the sequence has ended, or a stop string was found) or by `fail`.
    """

    __slots__ = (
        "_can_stop",
        "_error",
        "_fault",
        "_finish",
        "_may_be_plain",
        "_num_followed",
        "_num_sent",
        "_num_taken",
        "_plain",
        "_preface",
        "_text",
        "_text_stream",
        "_token_bytes",
        "admitted_at",
        "first_token_at",
        "has_news",
        "is_queued",
        "is_resting",
        "matcher",
        "noted_at",
        "queued_at",
        "reader",
        "rests_until",
        "sequence",
        "taken_at",
        "waits_with_others",
    )

    def __init__(self, sequence: Sequence, text_stream: TextStream, reader: Reader, echo: str | None = None) -> None:
        self.sequence = sequence
        self.reader = reader
        self._preface = Preface(sequence, echo) if Preface.wanted(sequence, echo) else None
        self.has_news = False  # for `next_delta`
        # The delivery's: whether it is in the queue, and since when; whether it rests after a message, and until when;
        # since when it has what is not taken, and what is in no message.
        self.is_queued = self.is_resting = False
        self.queued_at = self.rests_until = 0.0
        self.noted_at: float | None = None
        self.taken_at: float | None = None
        # In seconds of time.perf_counter(): when it first got a row, and the result with its first token.
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.matcher: Matcher | None = None  # where it has a grammar
        self._num_followed = 0  # output tokens that the matcher has seen
        self._text_stream = text_stream
        self._plain = text_stream.plain
        self._can_stop = text_stream.can_stop
        plain = self._preface is None and sequence.sampling.logprobs is None and not reader.is_whole
        self._may_be_plain = plain and not self._can_stop
        # Whether nothing has to be done about what comes after it was noted, until whoever gathers takes all of it.
        self.waits_with_others = reader.is_gathered and not reader.is_whole and not self._can_stop
        self._fault: Exception | None = None  # that `plain_delta` has met
        self._num_taken = 0  # output tokens that belong to the answer so far
        self._num_sent = 0  # of these, in a delta already
        self._text: list[str] | None = None  # pieces that are in no delta
        self._finish: Finish | None = None
        self._error: PagedError | None = None
        self._token_bytes = _token_bytes(sequence.sampling.logprobs)

    def take(self) -> None:
        """Take in the tokens that were appended since the last time, and the sequence's end."""
        if self.is_over:
            return
        if self._fault is not None:
            raise self._fault
        sequence = self.sequence
        if sequence.group is not None and sequence.end_reason is None:
            return  # a beam search has no answer before its end
        begin = sequence.num_prompt + self._num_taken
        at_end_token = sequence.end_reason is EndReason.END_TOKEN
        ids = sequence.token_ids[begin : len(sequence.token_ids) - at_end_token]  # an end token has no text
        if ids:
            piece = self._text_stream.push(ids)
            self._hold(piece.text, piece.num_tokens_used)
            if piece.stop_string is not None:
                self._end(Finish(stop_string=piece.stop_string))
                return
        if sequence.end_reason is EndReason.NOT_FINITE:
            self.fail(RequestFailed("the model's logits were not finite"))
        elif sequence.end_reason is not None:
            piece = self._text_stream.finish()
            self._hold(piece.text, int(at_end_token))
            by_token = at_end_token and piece.stop_string is None
            complete = sequence.end_reason is EndReason.COMPLETE and piece.stop_string is None
            self._end(Finish(sequence.token_ids[-1] if by_token else None, piece.stop_string, complete))
        elif not self.reader.is_whole:
            self.has_news = True

    def plain_delta(self) -> PlainDelta | None:
        """As `take` and then `next_delta`, at a fraction of their cost, where that is new tokens and their text and
        nothing else, and not the first: most deltas of most answers. None where it is not; nothing has changed then."""
        sequence = self.sequence
        if self.has_news or not self._may_be_plain or sequence.end_reason is not None or not self._num_sent:
            return None
        token_ids = sequence.token_ids[sequence.num_prompt + self._num_taken :]
        if not 0 < len(token_ids) <= MAX_DELTA_TOKENS:
            return None
        try:
            text = self._plain.push(token_ids)
        except Exception as error:  # noqa: BLE001 - `take` tells of it
            self._fault = error
            return None
        self._num_taken = self._num_sent = self._num_taken + len(token_ids)
        return text, token_ids

    @property
    def has_ended(self) -> bool:
        """Whether no token will follow, taken in or not."""
        return self.sequence.end_reason is not None or self.is_over

    @property
    def is_urgent(self) -> bool:
        """Whether what a result has brought must be taken in at once: an end, or what may be a stop string."""
        return self._can_stop or self.sequence.end_reason is not None or self.is_over

    def cannot_wait(self, max_tokens: int) -> bool:
        """Whether `take` has something to do although the reader is behind: an end, a stop string that may have come,
        or more than so many new tokens."""
        sequence = self.sequence
        if self.is_urgent:
            return True
        return len(sequence.token_ids) - sequence.num_prompt - self._num_taken > max_tokens

    def follow_grammar(self) -> bytes | None:
        """The mask for its next token; None where its grammar allows none. Raises GrammarStuck, NotAllowed."""
        if self.matcher is None:
            raise RuntimeError(f"{self.sequence.request_id}: an answer without a grammar needs no mask")
        new_ids = self.sequence.token_ids[self.sequence.num_prompt + self._num_followed :]
        self._num_followed += len(new_ids)
        return self.matcher.follow(new_ids)

    @property
    def grammar(self) -> Grammar:
        """Of an answer that has one."""
        if self.matcher is None:
            raise RuntimeError(f"{self.sequence.request_id}: an answer without a grammar")
        return self.matcher.grammar

    @property
    def is_over(self) -> bool:
        return self._finish is not None or self._error is not None

    @property
    def has_more(self) -> bool:
        """Whether there is something for a message, taken or not."""
        return self.has_news or self.noted_at is not None

    @property
    def outcome(self) -> Outcome:
        """What has become of it, at its end."""
        if self._finish is not None:
            return "finished"
        cancelled = self._error is None or isinstance(self._error, RequestAborted | DeadlineExceeded)
        return "cancelled" if cancelled else "failed"

    @property
    def ended_by_length(self) -> bool:
        return self._finish is not None and self._finish.by_length

    @property
    def error(self) -> PagedError | None:
        """What has ended it, if not its last token."""
        return self._error

    def fail(self, error: PagedError) -> None:
        """End with an error instead of a last delta. Harmless if the answer is over."""
        if not self.is_over:
            self._error = error
            self._text = None  # nothing of it will be said, though its reader may never come to hear why
            if isinstance(self.sequence.logprobs, list):
                self.sequence.logprobs.clear()
            self.has_news = True
            self.reader.wake()

    def next_delta(self) -> Delta:
        """All that waits, as far as one message goes. Raises the error that has ended the answer."""
        self.has_news = False
        if self._error is not None:
            raise self._error
        if self._preface is not None:
            return self._next_of_preface(self._preface)
        sequence = self.sequence
        begin, end = self._num_sent, min(self._num_taken, self._num_sent + MAX_DELTA_TOKENS)
        self._num_sent = end
        text, self._text = "".join(self._text or ()), None
        delta = Delta(
            text=text,
            token_ids=sequence.token_ids[sequence.num_prompt + begin : sequence.num_prompt + end],
            logprobs=sequence.logprobs[begin:end],
            index=sequence.sampling.index,
        )
        if not self.reader.is_whole:
            self.reader.unread_bytes -= len(text) + (end - begin) * self._token_bytes
        if end < self._num_taken:
            self.has_news = True
            return delta
        if self._finish is None:
            return delta
        delta.finish, delta.usage, delta.score = self._finish, self._usage(), sequence.score
        return delta

    @property
    def total_logprob(self) -> float:
        """Of the answer's tokens, where log-probabilities were asked for."""
        return sum(entry.logprob for entry in self.sequence.logprobs[: self._num_taken])

    def _next_of_preface(self, preface: Preface) -> Delta:
        delta = preface.next_delta()
        if preface.is_over:
            self._preface = None
        self.has_news = True
        return delta

    def _hold(self, text: str, num_tokens: int) -> None:
        """Until the next delta."""
        if self._text is None:
            self._text = [text]
        else:
            self._text.append(text)
        self._num_taken += num_tokens
        if not self.reader.is_whole:
            self.reader.unread_bytes += len(text) + num_tokens * self._token_bytes

    def _end(self, finish: Finish) -> None:
        self._finish = finish
        self.has_news = True

    def _usage(self) -> Usage:
        sequence = self.sequence
        return Usage(sequence.num_prompt, self._num_taken, sequence.num_cached or 0)


def _token_bytes(num_logprobs: int | None) -> int:
    """What a token takes that waits for its reader, in bytes, but for its text."""
    return TOKEN_BYTES if num_logprobs is None else TOKEN_BYTES + LOGPROBS_BYTES + ALTERNATIVE_BYTES * num_logprobs
