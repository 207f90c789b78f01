"""A fixture for tests that also run on a GPU, where every operation must use its Triton kernel."""

from tests.support.only_kernels import only_kernels

__all__ = ["only_kernels"]
