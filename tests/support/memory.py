"""The memory of the test process."""

import ctypes
import gc

import psutil


def return_free_memory() -> None:
    """Return the free memory of the heap to the kernel; if there is none, this takes about 2 ms."""
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident set size of this process, after free memory was given back."""
    gc.collect()
    return_free_memory()
    return int(psutil.Process().memory_info().rss)
