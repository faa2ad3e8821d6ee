"""Build hook: generates the protobuf stubs of `protos/` into `paged/v1/`. Run as a script, it does only that."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent


def generate_stubs() -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and `.pyi` files next to `paged/v1/__init__.py`.

    Each is replaced as a whole, for another process may be importing it.
    """
    protos = sorted(path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto"))
    with TemporaryDirectory(prefix=".stubs-", dir=ROOT) as made:
        outputs = [f"--{kind}_out={made}" for kind in ("python", "grpc_python", "pyi")]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *map(str, protos)]
        subprocess.run(command, check=True)
        for stub in Path(made).rglob("*.py*"):
            os.replace(stub, ROOT / stub.relative_to(made))


if __name__ == "__main__":
    generate_stubs()
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class StubsHook(BuildHookInterface):
        def initialize(self, version: str, build_data: dict) -> None:
            generate_stubs()
