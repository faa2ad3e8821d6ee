"""Build hook: generates the protobuf stubs of `protos/` into `paged/v1/`. Run as a script, it does only that."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent


def generate_stubs() -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and `.pyi` files next to `paged/v1/__init__.py`."""
    protos = sorted(path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto"))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", f"--python_out={ROOT}"]
        + [f"--grpc_python_out={ROOT}", f"--pyi_out={ROOT}", *map(str, protos)],
        check=True,
    )


if __name__ == "__main__":
    generate_stubs()
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class StubsHook(BuildHookInterface):
        def initialize(self, version: str, build_data: dict) -> None:
            generate_stubs()
