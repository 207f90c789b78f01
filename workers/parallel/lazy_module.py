"""Imports modules on first use.

An engine with one rank sends no messages, so it must run without protobuf (`make gpu`).
"""

from importlib import import_module
from typing import Any


class LazyModule:
    """Proxy of a module; imports the module when an attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
