"""What is written in README.md and docs/: blocks of code, and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
SHELLS = ("bash", "sh")


@dataclass(frozen=True, slots=True)
class Block:
    """Between two fences. `line` is that of the first."""

    page: str
    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One a line, joined where it goes on; nothing of a block in another language than a shell's."""
        if self.language not in SHELLS:
            return []
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = (re.sub(r"\s+# .*$", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    text = text_of(page)
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def inline_code(page: str) -> list[str]:
    """What stands between backticks, outside of blocks; over the end of a line, too."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
