"""How long streams rest after a message, so that what comes for them meanwhile leaves as one."""

REST_S_PER_STREAM = 100e-6  # at least: a message costs as much as ten tokens in it
MAX_STRETCH, MAX_REST_S = 5.0, 2.0  # beyond which plans wait for messages: a stream is to be heard of now and then
MIN_REST_S = 0.002  # less is not worth the timer
AIM_S = 0.02  # that a message waits for its turn, on average, where rests are longer than the least
GAIN = 0.25  # by which rests change, at most, with a message of each stream


class Rests:
    """So long that messages hardly wait for each other: where the event loop is too busy for as many as there are, they
    grow until there are so few that it is not."""

    def __init__(self) -> None:
        self._stretch = 1.0

    def note_wait(self, wait_s: float, num_streams: int) -> None:
        """A message leaves, after it has waited for its turn for so long."""
        off = min((wait_s - AIM_S) / AIM_S, 1.0)
        stretch = self._stretch * (1 + off * GAIN / max(num_streams, 1))
        self._stretch = max(min(stretch, MAX_STRETCH), 1.0)

    def rest_s(self, num_streams: int) -> float:
        rest_s = min(num_streams * REST_S_PER_STREAM * self._stretch, MAX_REST_S)
        return rest_s if rest_s >= MIN_REST_S else 0.0
