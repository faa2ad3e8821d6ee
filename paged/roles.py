"""What a bearer token may do. Which methods a role opens is the scheduler's to say."""

from enum import StrEnum


class Role(StrEnum):
    """As a token file names it."""

    GENERATE = "generate"
    READ = "read"
    CONTROL = "control"
