"""Tests that run on a GPU too: there nothing is computed without its kernel."""

from tests.support.only_kernels import only_kernels

__all__ = ["only_kernels"]
