"""Panics of the tokenizers library, which is written in Rust: no `Exception`, so that nothing that catches those would
keep them from ending the process."""

import contextlib
from collections.abc import Iterator


class LibraryPanic(Exception):
    """The library has met what it holds to be impossible. It can be used again."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises LibraryPanic where the library panics."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of pyo3, which offers no way to import it
            raise
        raise LibraryPanic(str(error)) from error
