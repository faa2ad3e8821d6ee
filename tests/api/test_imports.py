"""A scheduler starts without what only some of its settings need."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["aiohttp", "opentelemetry", "prometheus_client"])
def test_what_only_a_setting_needs_is_not_imported(package: str) -> None:
    program = f"import scheduler_svc.__main__, sys; print({package!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
