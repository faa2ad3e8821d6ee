"""Files that hold secrets, and those beside them: made once, whole, and with the right mode from the start."""

import os
import tempfile
from pathlib import Path

SECRET_MODE = 0o600
PUBLIC_MODE = 0o644


def make(path: Path, data: bytes, *, secret: bool) -> None:
    """A new file. Raises FileExistsError rather than to write over one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET_MODE if secret else PUBLIC_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def replace(path: Path, data: bytes, *, secret: bool) -> None:
    """What the file held before is gone at once: whoever reads it sees either."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, SECRET_MODE if secret else PUBLIC_MODE)
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
