"""The command that builds the native kernels ahead of time, for a machine without a compiler or a faster start."""

import argparse
from pathlib import Path

from kernels.cpu.compiling import PREBUILT, build, find_or_build, stem
from kernels.cpu.levels import LEVELS, supported


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Build the native CPU kernels.")
    parser.add_argument("--level", action="append", choices=sorted(LEVELS), help="May be repeated; the CPU's best.")
    parser.add_argument("--to", type=Path, help=f"Directory; what is in {PREBUILT} is looked at first. The cache.")
    arguments = parser.parse_args()
    for name in arguments.level or supported()[:1]:
        if arguments.to is None:
            print(find_or_build(LEVELS[name]))
            continue
        arguments.to.mkdir(parents=True, exist_ok=True)
        library = arguments.to / f"{stem(LEVELS[name])}.so"
        build(LEVELS[name], library)
        print(library)


if __name__ == "__main__":
    main()
