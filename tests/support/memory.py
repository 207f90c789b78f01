"""The memory of the test process."""

import ctypes
import gc

import psutil


def resident_bytes() -> int:
    """Return the resident set size of this process, after free memory was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
