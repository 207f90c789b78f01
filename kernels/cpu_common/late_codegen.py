"""Make numba optimize and assemble whole programs instead of each function separately.

By default, numba runs all LLVM passes over each jitted function and generates its machine code.
Both are repeated for every caller into which the function is linked. This is unnecessary for
functions that only compiled code calls: their LLVM IR is linked into the outermost caller, and it
is enough to optimize and assemble this caller once. The change halves the compile time of the CPU
kernels.

numba has no option for this, so this module depends on internals of the pinned numba version. With
any other version, the module changes nothing, and compiling takes longer.
"""

# mypy: disable-error-code="no-untyped-call, misc"

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numba.extending
from numba.core import codegen
from numba.core.registry import cpu_target
from numba.core.targetconfig import TargetConfig

TESTED_VERSION = "0.68.1"

F = TypeVar("F", bound=Callable[..., Any])


def inner(allocates: bool = False, **options: Any) -> Callable[[F], F]:
    """Return a decorator like `numba.njit`, for functions that only compiled functions call.

    By default, the functions do not count references to arrays: the atomic operations that count
    them took a quarter of the time of decode attention. A function without counts only borrows the
    arrays of its callers. numba refuses to compile it if it creates an array or returns a view.
    numba does not notice two other errors: no inner function may return an array that it has
    created, and a function with counts must not call one without counts that returns views (in a
    tuple) or arguments.

    A function with counts should only allocate scratch arrays, and leave the loops to a function
    without counts. Each slice of an array changes a count, and all threads share the counts.

    Args:
        allocates: whether the function creates arrays, and therefore counts references.
        options: further options of `numba.njit`.
    """
    njit: Any = numba.njit  # the stubs of numba's `njit` lack some of its options
    decorate: Callable[[F], F] = njit(
        nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=allocates, **options
    )
    return decorate


def inner_overload(function: Callable[..., Any]) -> Callable[[F], F]:
    """Return numba's decorator `overload`, for implementations without reference counts."""
    overload: Any = numba.extending.overload
    decorate: Callable[[F], F] = overload(function, jit_options={"_nrt": False})
    return decorate


class LateLibrary(codegen.JITCodeLibrary):
    """A numba code library that generates machine code only when it is first needed."""

    _assembled = False

    def finalize(self) -> None:
        """Link the callees, as numba does, but skip optimization and code generation."""
        self._codegen._check_llvm_bugs()
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of a function, or 0 if the library does not define it."""
        self._ensure_finalized()
        # The body of a parallel loop needs no address, because only the function that contains the
        # loop calls the body.
        if "__numba_parfor_gufunc" in self.name or not self._defines(name):
            return 0
        self._assemble()
        address: int = super().get_pointer_to_function(name)
        return address

    def _get_compiled_object(self) -> bytes:
        self._assemble()
        compiled: bytes = super()._get_compiled_object()
        return compiled

    def _defines(self, name: str) -> bool:
        if self._assembled:
            return True  # numba's own lookup of the address checks the name
        return any(each.name == name for each in self.get_defined_functions())

    def _assemble(self) -> None:
        if self._assembled:
            return
        self._assembled = True
        self._optimize_final_module()
        self._final_module.verify()
        self._finalize_final_module()
        generator: Any = self._codegen
        generator.set_waiting_envs()

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> "LateLibrary":
        library: LateLibrary = super()._unserialize(codegen, state)
        library._assembled = True
        return library


def _are_equal(flags: TargetConfig, other: object) -> Any:
    """Return whether two sets of compiler flags are equal; replaces `TargetConfig.__eq__`.

    The options that were set are compared first. Defaults are compared only if these options
    differ, because comparing all defaults is slow.
    """
    if not isinstance(other, TargetConfig):
        return NotImplemented
    return flags._values == other._values or flags.values() == other.values()


def _speed_up_flags() -> None:
    """Replace the slow hash and comparison of numba's compiler flags, which are dictionary keys.

    numba looks up thousands of such keys per function. Its own hash collects and sorts the names of
    all options at each call.
    """
    config: Any = TargetConfig
    config.__eq__ = _are_equal
    config.__hash__ = lambda flags: hash(type(flags))


def install() -> bool:
    """Use `LateLibrary` for all code that numba compiles in this process from now on.

    If numba's version is not TESTED_VERSION, change nothing and return False.
    """
    if numba.__version__ != TESTED_VERSION:
        return False
    generator: Any = cpu_target.target_context.codegen()
    if generator._library_class is LateLibrary:
        return True
    _speed_up_flags()
    set_env = generator.set_env
    waiting: dict[str, Any] = {}

    def set_env_later(name: str, env: Any) -> None:
        """Set a function's numba environment once the machine code of the function exists."""
        if generator._engine.is_symbol_defined(name):
            set_env(name, env)
        else:
            waiting[name] = env

    def set_waiting_envs() -> None:
        for name in [each for each in waiting if generator._engine.is_symbol_defined(each)]:
            set_env(name, waiting.pop(name))

    generator.set_env = set_env_later
    generator.set_waiting_envs = set_waiting_envs
    generator._library_class = LateLibrary
    return True
