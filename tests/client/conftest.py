from tests.api.conftest import address, client, engine, settings

__all__ = ["address", "client", "engine", "settings"]
