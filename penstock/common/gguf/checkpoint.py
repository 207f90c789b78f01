"""Opens a model in GGUF format, which may be split into several files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.gguf.header import GgufHeader, GgufTensor, read_header
from penstock.common.gguf.metadata import Metadata

SPLIT_NAME = re.compile(r"(?P<model>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Pattern of the file names of a model that is split into several files, counted from 1."""

MAX_FILES = 1024


def is_gguf(model: Path) -> bool:
    """Return whether the path of a model stands for a GGUF file instead of a checkpoint folder.

    Every existing file counts as a GGUF file.
    """
    return model.is_file() or (model.suffix == ".gguf" and not model.is_dir())


def model_name(path: Path) -> str:
    """Return the name of a model: its file name without `.gguf` and without a part number."""
    split = SPLIT_NAME.fullmatch(path.name)
    return split["model"] if split else path.stem


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """A model in one or several GGUF files.

    Attributes:
        path: The only file, or the first of several files.
        metadata: The metadata of the file `path`.
        headers: The headers of all files.
        tensors: The tensors of all files, by name.
    """

    path: Path
    metadata: Metadata
    headers: tuple[GgufHeader, ...]
    tensors: Mapping[str, GgufTensor]


def open_gguf(path: Path) -> GgufCheckpoint:
    """Read the header of a model's GGUF file. If the model is split, read the headers of all files.

    Raises:
        BadCheckpoint: A file is missing or invalid, or the files do not belong together.
        UnsupportedModel: The file is not the first file of a split model, or contains no model.
    """
    first = read_header(path)
    metadata = Metadata(path, first.metadata)
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(
            f"{path}: general.type is {kind!r:.40}, expected 'model': give the GGUF file of a model"
        )
    headers = (first, *_other_headers(path, metadata))
    tensors: dict[str, GgufTensor] = {}
    for part in headers:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise BadCheckpoint(
                    f"{part.path}: tensor {name} is also in {tensors[name].path}: the files do not "
                    "belong together"
                )
            tensors[name] = tensor
    wanted = metadata.count("split.tensors.count", len(tensors))
    if len(tensors) != wanted:
        raise BadCheckpoint(
            f"{path}: split.tensors.count is {wanted}, but the model's files have {len(tensors)} "
            "tensors in all: download the files again"
        )
    return GgufCheckpoint(path, metadata, headers, tensors)


def _other_headers(path: Path, metadata: Metadata) -> list[GgufHeader]:
    count = metadata.count("split.count", 1)
    if count <= 1:
        return []
    if count > MAX_FILES:
        raise metadata.bad("split.count", f"a number of at most {MAX_FILES}")
    split = SPLIT_NAME.fullmatch(path.name)
    if split is None or int(split["count"]) != count:
        raise BadCheckpoint(
            f"{path} is one of {count} files of a model: expected the file names "
            f"MODEL-00001-of-{count:05}.gguf to MODEL-{count:05}-of-{count:05}.gguf"
        )
    names = [f"{split['model']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    if metadata.count("split.no", 0) != 0:
        raise UnsupportedModel(
            f"{path} is not the first file of its model: give {path.with_name(names[0])}"
        )
    headers = []
    for number, name in enumerate(names[1:], start=1):
        header = read_header(path.with_name(name))
        own = Metadata(header.path, header.metadata)
        found = own.count("split.no", 0), own.count("split.count", 1)
        if found != (number, count):
            raise BadCheckpoint(
                f"{header.path}: split.no is {found[0]} and split.count is {found[1]}, expected "
                f"{number} and {count}: the files do not belong together"
            )
        headers.append(header)
    return headers
