"""Modules that are imported when something of them is first used.

An engine of one rank speaks to nobody: it computes where protobuf is not installed (`make gpu`).
"""

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
