"""A stack for each module, where .ci/container-proof has started a docker daemon and built the images."""

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.containers.stack import Stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    docker = os.environ.get("PAGED_PROOF_DOCKER")
    if docker is None:
        pytest.skip("needs images and a docker daemon: run .ci/container-proof, which makes both")
    stack = Stack(docker, f"proof{uuid.uuid4().hex[:8]}")
    try:
        yield stack
    finally:
        stack.down()
