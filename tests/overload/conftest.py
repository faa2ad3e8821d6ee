from tests.system.conftest import system

__all__ = ["system"]
