"""Check that Triton can compile its C modules on this machine; the check needs no GPU.

Run it as `python -m penstock.kernels.triton_common.check_compiler`. Triton compiles a C module when
a process first uses a GPU. The compilation needs a C compiler and the headers of libc and Python.
"""

import sys

from triton.runtime.build import compile_module_from_src

SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>

static struct PyModuleDef stub = {PyModuleDef_HEAD_INIT, "penstock_stub", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_penstock_stub(void) { return PyModule_Create(&stub); }
"""


def main() -> int:
    module = compile_module_from_src(SOURCE, "penstock_stub")
    print(f"compiled and loaded {module.__name__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
