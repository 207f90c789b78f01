"""Jobs of helper processes free their memory, and end the process if there is none left."""

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest

from penstock.router.errors import Code, ServingError, invalid
from penstock.router.helpers.serving import do_job


class Data:
    """Stands for the objects of a large body."""


class PanicException(BaseException):
    """The exception of a library that is written in Rust."""


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("cause", ["none", "other", "itself"])
def test_data_of_a_refused_job_is_freed_without_the_garbage_collector(cause: str) -> None:
    data: list[weakref.ref[Data]] = []

    def refuse(items: Sequence[bytes]) -> list[bytes]:
        own = Data()
        data.append(weakref.ref(own))
        try:
            raise invalid("too large", "messages")
        except ServingError as error:
            if cause == "none":
                raise
            if cause == "itself":
                raise error from error
            raise invalid("too large", "input") from error

    error = do_job(refuse, []).error
    assert error is not None
    assert (error.code, error.message) == (Code.INVALID, "too large")
    assert error.param == ("input" if cause == "other" else "messages")
    assert data[0]() is None


def test_panic_of_a_library_is_a_lack_of_memory() -> None:
    def panic(items: Sequence[bytes]) -> list[bytes]:
        raise PanicException("PyObject pointer is null")

    with pytest.raises(MemoryError):
        do_job(panic, [])
