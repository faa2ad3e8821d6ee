"""The one error of loading."""


class ModelRefused(Exception):
    """The model cannot be served as it should be; the text says why and what to do. Nothing has been served yet."""
