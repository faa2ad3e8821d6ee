"""Every command in README.md and docs/ is run as it stands there, or is listed here with the reason why it is not."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, SHELLS, Block, all_blocks, blocks, inline_code, text_of
from tests.shell import BOTH, EXECUTOR, SCHEDULER, Shell

# What is not run here, and why. Whoever adds a command to a page adds nothing here unless it cannot be run.
NOT_HERE = {
    r"make (venv|test|lint|docs)\b": "the gate does it",
    r"make demo": "slow; see test_the_demo",
    r"(\S+ -m )?pip3? (install|download)|git clone|cd ": "fetches from elsewhere, or prepares for what follows",
    r"(\S*/)?python3? -m benchmarks\.": "minutes long; .ci/slow runs them, and their flags are looked up below",
    r"PYTHONPATH=\S+ .*benchmarks\.gpu_check": "needs a GPU",
    r"\S*torchrun ": "needs a model; tests/system/test_tensor_parallel.py",
    r"docker|kubectl|kustomize|kind|minikube|helm": "needs containers; .ci/slow",
    r"grpcurl": "is not to be had from PyPI or Debian; its messages are those of `buf curl`, below",
    r"\.ci/": "the gate, or what runs beside it",
}
OWN_TEST = {"docs/security.md": "tests/security/test_set_up.py"}
# What stands before a page's commands where the page takes it for granted.
BEFORE = {
    "README.md": ["paged keys create keys --host localhost"],
    "docs/command_line.md": ["paged up --simulate"],
    "docs/gateway.md": ["paged-executor --simulate", "paged-scheduler", "paged-scheduler"],
}
BRIEF = "--seconds 0.5 --warm-up-s 0"
INSTEAD = {
    "README.md": {"--seconds 10": BRIEF},
    "docs/command_line.md": {"--seconds 60": BRIEF, "--seconds 5": BRIEF, "--json --plot": f"{BRIEF} --json --plot"},
    "docs/gateway.md": {"--port 8000": "--port 8000 --prometheus-host 127.0.0.1 --prometheus-port 8999"},
}
# What those that are run print.
SAID = {
    r"\S*paged bench .*--json": ['"tokens_per_s"'],
    r"\S*paged bench ": ["first token", "answered"],
    r"python examples/stream\.py": ["[32 tokens]"],
    r"python examples/cancel\.py": [
        "left after",
        "by its deadline: DEADLINE_EXCEEDED",
        "by somebody: CANCELLED",
        "no block",
    ],
    r"python examples/retries\.py": ["sampling.temperature: "],
    r"buf curl .*--list-methods": ["paged.v1.InferenceService/Generate"],
    r"buf curl .*/Generate": ['"finish"', '"completionTokens": 8'],
    r"buf curl .*/GetLoad": ['"executorAttached": true'],
}
SERVICES = (EXECUTOR, SCHEDULER, BOTH)
DEMO_S = 900.0  # with a model that may have to be prepared


def reason_not_to(command: str) -> str | None:
    return next((why for pattern, why in NOT_HERE.items() if re.match(pattern, command)), None)


def is_service(command: str) -> bool:
    return re.match(rf"(\.venv/bin/)?({'|'.join(SERVICES)})(?![\w-])", command) is not None


def is_run(block: Block) -> bool:
    if block.language == "python":
        return True
    return any(reason_not_to(command) is None for command in block.commands)


SLOW = ["docs/gateway.md"]  # tests/system/test_gateway.py is the gate's
RUN = [
    pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page
    for page in PAGES
    if page not in OWN_TEST and any(is_run(block) for block in blocks(page))
]


@pytest.mark.parametrize("page", RUN)
def test_commands_of_the_page_do_what_they_should(page: str, tmp_path: Path) -> None:
    with Shell(tmp_path, INSTEAD.get(page)) as shell:
        for command in BEFORE.get(page, []):
            _do(shell, command)
        for block in blocks(page):
            if is_run(block):
                _run(shell, block)


def _run(shell: Shell, block: Block) -> None:
    if block.language == "python":
        program = shell.directory / f"line{block.line}.py"
        program.write_text(shell.ported(block.text.replace('"MODEL"', '"simulated"')))
        assert shell.run_once_it_works(f"python {program}").strip()
        return
    if any(map(is_service, block.commands)):
        shell.stop()
    for command in block.commands:
        if reason_not_to(command) is None:
            _do(shell, command)


def _do(shell: Shell, command: str) -> None:
    if is_service(command):
        shell.start(command)
    elif command.startswith("smg "):
        shell.start_other(command)
    else:
        said = shell.run_once_it_works(command)
        for word in next((words for pattern, words in SAID.items() if re.match(pattern, command)), []):
            assert word in said, f"{command}\n{said}"


def test_what_looks_like_commands_is_said_to_be_some() -> None:
    starts = r"(\.venv/bin/|paged |paged-|pip |make |python|docker |kubectl |buf |grpcurl |smg |curl |\$ )"
    for block in all_blocks():
        if block.language not in SHELLS and block.language != "python":
            found = re.search(rf"^{starts}", block.text, re.MULTILINE)
            assert found is None, f"{block.page}:{block.line}: commands belong in a ```bash block"


def test_pages_with_a_test_of_their_own_have_it() -> None:
    for page, test in OWN_TEST.items():
        assert Path(page).name in (ROOT / test).read_text()


def test_messages_for_grpcurl_are_those_that_buf_sends() -> None:
    commands = [shlex.split(command) for block in blocks("docs/examples.md") for command in block.commands]
    sent = {
        tool: {
            re.sub(r"^https?://[^/]+/", "", command[-1]): json.loads(command[command.index(flag) + 1])
            for command in commands
            if command[0] == tool and flag in command
        }
        for tool, flag in (("buf", "--data"), ("grpcurl", "-d"))
    }
    assert sent["buf"] == sent["grpcurl"]
    assert len(sent["buf"]) == 2


def test_modules_that_are_named_are_there() -> None:
    for page in PAGES:
        for module in re.findall(r"python3? -m ([\w.]+)", text_of(page)):
            path = ROOT / module.replace(".", "/")
            there = path.with_suffix(".py").exists() or (path / "__main__.py").exists() or module == "pip"
            assert there, f"{page}: python -m {module}"


def test_benchmarks_that_are_named_have_their_flags() -> None:
    said = [command for block in all_blocks() for command in block.commands]
    said += [code for page in PAGES for code in inline_code(page)]
    for command in said:
        if (found := re.search(r"python3? -m benchmarks\.(\w+)(.*)", command)) is None:
            continue
        path = ROOT / "benchmarks" / found[1]
        files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        source = "".join(file.read_text() for file in files)
        for flag in re.findall(r"--[a-z][a-z-]*", found[2]):
            assert f'"{flag}"' in source, f"{command}: {flag}"


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    """`make demo` as README has it, once there is an environment; the model is that of whoever runs this."""
    with Shell(tmp_path, timeout_s=DEMO_S) as shell:
        answer = shell.run(f"HOME={Path.home()} paged demo")
    assert "tokens/s" in answer
    assert "Both processes have stopped." in answer
