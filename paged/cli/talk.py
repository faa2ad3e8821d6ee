"""`paged chat`: a conversation, answered as it goes on. The model sees all of it each time."""

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paged.cli.answers import Answer, say
from paged.cli.show import printable
from paged.client import Client, PagedClientError, chat

HELP = """/new           begin a new conversation
/undo          forget the last question and its answer
/system TEXT   begin a new conversation with this instruction
/save FILE     write the conversation as JSON
/quit          end; so does Ctrl-D. Ctrl-C ends an answer, and at the prompt the conversation"""


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


class Conversation:
    """What has been said so far. `options` are those of each answer; its pieces are told to `hear` as they come."""

    def __init__(
        self, client: Client, options: dict[str, Any], system: str | None, hear: Callable[[str], None]
    ) -> None:
        self._client = client
        self._options = options
        self._hear = hear
        self.turns: list[Turn] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Anew."""
        self.turns = [] if system is None else [Turn("system", system)]

    def undo(self) -> bool:
        """Forget the last question, and all after it. Returns whether there was one."""
        last = next((i for i in reversed(range(len(self.turns))) if self.turns[i].role == "user"), None)
        if last is not None:
            del self.turns[last:]
        return last is not None

    async def ask(self, text: str) -> Answer:
        """What has come of an answer that is cancelled counts as said. Raises PagedClientError; then the question was
        never asked."""
        asked, answer = [*self.turns, Turn("user", text)], Answer()
        prompt = chat(*((turn.role, turn.content) for turn in asked))
        try:
            async for message in self._client.generate(prompt, **self._options):
                answer.take(message)
                self._hear(message.text)
        except asyncio.CancelledError:
            self.turns = [*asked, Turn("assistant", answer.text)]
            raise
        self.turns = [*asked, Turn("assistant", answer.text)]
        return answer


def converse(
    open_client: Callable[[], Client], options: dict[str, Any], system: str | None, *, as_json: bool
) -> PagedClientError | None:
    """Until the input ends, or says so. On a terminal an error of one answer is told and the conversation goes on;
    elsewhere it ends, and the error is returned."""
    is_typed = sys.stdin.isatty()
    if is_typed and importlib.util.find_spec("readline") is not None:
        import readline  # noqa: F401 - so that lines can be edited, and found again
    with asyncio.Runner() as runner:
        client = runner.run(_made(open_client))
        try:
            conversation = Conversation(client, options, system, (lambda text: None) if as_json else say)
            while (line := _next_line("> " if is_typed else "")) is not None and line != "/quit":
                if line.startswith("/"):
                    print(printable(_command(conversation, line)), file=sys.stderr)
                elif line and (error := _answer(runner, conversation, line, as_json=as_json)) is not None:
                    if not is_typed:
                        return error
                    print(f"[{printable(str(error))}]", file=sys.stderr)
        finally:
            runner.run(client.close())
    return None


async def _made(open_client: Callable[[], Client]) -> Client:
    return open_client()


def _next_line(prompt: str) -> str | None:
    with suppress(EOFError, KeyboardInterrupt):
        return input(prompt).strip()
    return None


def _answer(runner: asyncio.Runner, conversation: Conversation, text: str, *, as_json: bool) -> PagedClientError | None:
    try:
        answer = runner.run(conversation.ask(text))
    except PagedClientError as error:
        return error
    except KeyboardInterrupt:  # the answer's end, not ours
        print()
        return None
    print(answer.as_json() if as_json else "")
    return None


def _command(conversation: Conversation, line: str) -> str:
    """What it has to say."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/new", "/system"):
        conversation.begin(rest if name == "/system" and rest else None)
        return "[a new conversation]"
    if name == "/undo":
        return "[forgotten]" if conversation.undo() else "[there is nothing to forget]"
    if name == "/save":
        return _save(conversation, rest)
    return HELP


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "[/save needs the name of a file]"
    try:
        Path(name).expanduser().write_text(json.dumps([asdict(turn) for turn in conversation.turns], indent=1) + "\n")
    except OSError as error:
        return f"[cannot write {name}: {error.strerror}]"
    return f"[{len(conversation.turns)} turns are in {name}]"
