"""The command that builds the native kernels ahead of time, for a machine without a compiler or a faster start."""

import argparse
from pathlib import Path

from kernels.cpu.compiling import PREBUILT, BuildError, build, find_or_build, stem
from kernels.cpu.levels import LEVELS, supported


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Build the native CPU kernels.")
    parser.add_argument(
        "--level", action="append", choices=sorted(LEVELS), help="May be repeated; the CPU's best if left out."
    )
    parser.add_argument(
        "--to",
        type=Path,
        help=f"Directory, the user's cache if left out. What is in {PREBUILT} is looked at before that.",
    )
    arguments = parser.parse_args()
    levels = arguments.level or supported()[:1]
    if not levels:
        parser.error("there are none for this CPU; name another's --level")
    try:
        for name in levels:
            print(_made(name, arguments.to))
    except (BuildError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def _made(level: str, directory: Path | None) -> Path:
    if directory is None:
        return find_or_build(LEVELS[level])
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"{stem(LEVELS[level])}.so"
    build(LEVELS[level], library)
    return library


if __name__ == "__main__":
    main()
