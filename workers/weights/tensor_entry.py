"""Interface to a tensor in a checkpoint. Each format of weight files implements it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from torch import Tensor

from penstock.workers.weights.regions import Region


@dataclass(frozen=True, slots=True)
class TensorEntry(ABC):
    """A tensor in a checkpoint: `num_bytes` bytes at offset `start` of the file `path`.

    `name` is the tensor's name in a safetensors checkpoint of the same model. `dtype` is the file
    format's name of the item type. `shape` is the shape after loading.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def stored_name(self) -> str:
        """The tensor's name in the file, for error messages."""
        return self.name

    @abstractmethod
    def loadable_dtypes(self, accepted: tuple[str, ...]) -> tuple[str, ...]:
        """Return the values of `dtype` that may be loaded into a parameter.

        Args:
            accepted: The dtypes that the parameter takes from a safetensors file.
        """

    @abstractmethod
    def bytes_of(self, num_items: int) -> int:
        """Return how many bytes `num_items` items of a loadable dtype take up in the file."""

    @abstractmethod
    def load(
        self,
        target: Tensor,
        file: BufferedReader,
        progress: Callable[[int], None],
        region: Region = (),
    ) -> None:
        """Load the tensor, or only a region of it, into `target`, piece by piece.

        Args:
            target: Contiguous tensor with the shape of the region, of an accepted dtype.
            file: The open file `path`.
            progress: Called with the number of bytes of each piece. The sum over all pieces is
                `bytes_of(n)`, where n is the number of items in the region.
            region: Part of the tensor to load; empty means all of it.
        """
