"""Finds or downloads the checkpoint of a model, and checks it before the cluster starts."""

import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from penstock.cluster.spec.spec import BUNDLED
from penstock.common.gguf.checkpoint import is_gguf, model_name
from penstock.common.gguf.documents import tokenizer_of
from penstock.workers.models.config import BadCheckpoint, is_file_name, read_json
from penstock.workers.models.spec import check_config

SHIPPED = Path(__file__).resolve().parent.parent / "models" / BUNDLED
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*"]
OTHER_WEIGHTS = ["*/*.safetensors", "consolidated*.safetensors"]
"""The same weights in other formats, which some hub models contain and which are never read."""
ACTIONS = {
    401: "check the name of the model, or set HF_TOKEN",
    403: "accept the terms of the model on the hub, and set HF_TOKEN",
    404: "check the name of the model",
}
"""Advice for HTTP statuses of the hub."""


class NoModel(ValueError):
    """The model's checkpoint cannot be found or downloaded. The message has only one line."""


def find(model: str = BUNDLED, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of a model. If `model` is a hub name, download it first.

    The name `demo` (`BUNDLED`) always means the bundled model. To use a local folder with that
    name, pass `./demo`.

    Args:
        model: a folder, a GGUF file, a hub name or `BUNDLED`.
        revision: commit, tag or branch on the hub, or None for the main branch.

    Raises:
        NoModel: the download failed, or `revision` was given for a local or bundled model.
    """
    if model != BUNDLED and _is_on_hub(model):
        return download(model, WANTED_FILES, revision=revision)
    if revision is not None:
        raise NoModel(
            f"revision {revision!r} cannot be used with {model}, which is a local model: leave "
            "out the revision, or give a hub name"
        )
    if model == BUNDLED:
        return SHIPPED
    return Path(model).expanduser().absolute()


def default_name(model: str) -> str:
    """Return the default name of a model in the API: its hub name, folder name or file name."""
    if _is_on_hub(model):
        return model
    path = Path(os.path.abspath(Path(model).expanduser()))
    return (model_name(path) if is_gguf(path) else path.name) or model


def _is_on_hub(model: str) -> bool:
    path = Path(model).expanduser()
    return bool(HUB_NAME.fullmatch(model)) and not (path.exists() or is_gguf(path))


def download(
    model: str, wanted: list[str], folder: Path | None = None, revision: str | None = None
) -> Path:
    """Download those files of a hub model that match `wanted`, without `OTHER_WEIGHTS`.

    The files are stored in the hub's local cache, or in `folder` if it is given.

    Raises:
        NoModel: the download failed, and the cache has no copy.
    """
    # The hub library is imported here, because the import is slow and rarely needed.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = snapshot_download(
            model,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=OTHER_WEIGHTS,
            local_dir=folder,
        )
        return Path(found)
    except RevisionNotFoundError:
        reason = f"the hub has no revision {revision!r} of this model: give another revision"
    except HfHubHTTPError as error:
        status = error.response.status_code
        action = ACTIONS.get(status, "try again later")
        reason = f"the hub refused the download (HTTP {status}): {action}"
    except (LocalEntryNotFoundError, ConnectionError):
        reason = "the hub cannot be reached, and its local cache has no copy: check the network"
    except OSError as error:
        reason = f"the download failed: {error.strerror or ' '.join(str(error).split())}"
    except ValueError as error:
        reason = " ".join(str(error).split())
    raise NoModel(f"{model} is not a local folder, and {reason}")


def check(folder: Path, with_weights: bool = True) -> None:
    """Check that a checkpoint is complete and supported, as far as possible without torch.

    Args:
        folder: the checkpoint folder, or the GGUF file.
        with_weights: whether to check the weight files as well. They may exist only on the workers'
            nodes.

    Raises:
        BadCheckpoint: a file is missing or broken.
        UnsupportedModel: the model is of an unsupported kind.
    """
    check_config(folder)
    if is_gguf(folder):
        tokenizer_of(folder)  # `check_config` has already checked the tensors of the GGUF file
        return
    if not with_weights:
        _check_there(folder / "tokenizer.json")
        return
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(map(is_file_name, weight_map.values())):
            raise BadCheckpoint(f"{index} has no valid weight_map: download it again")
        files = sorted(set(weight_map.values()))
    else:
        files = [single.name]
    for path in [folder / "tokenizer.json", *(folder / name for name in files)]:
        _check_there(path)
    for name in files:
        _check_weights(folder / name)


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: copy or download the checkpoint again")


def _check_weights(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise BadCheckpoint(
            f"{path} is corrupt or incomplete ({error}): copy or download it again"
        ) from None
