"""When Python looks for garbage that refers to itself."""

import gc

YOUNG_OBJECTS = 700  # Python's own: more of them than have gone, and the young ones are looked at
# Of these passes, until those who outlived them are looked at again. After ten, as Python has it, that took 19 to 36 ms
# under load, in which an executor ran out of plans; after two it takes a few.
YOUNG_PASSES = 1
# A pass over all objects stops the event loop for some 20 µs per open stream, so for 80 ms with 4,096. What requests
# leave does not refer to itself, but for a few small objects of gRPC's, garbage from the moment a call has begun, which
# the passes over young ones find.
ALL_PASSES = 4000


def collect_rarely() -> None:
    """All objects are looked at once in so many of the second kind of passes: not within the hour, under load."""
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_PASSES, ALL_PASSES)
