"""The checkpoint that MODEL names: found, or fetched, and looked through before anything starts."""

import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from penstock.cluster.spec.spec import BUNDLED
from penstock.workers.models.config import BadCheckpoint, read_json
from penstock.workers.models.spec import check_config

SHIPPED = Path(__file__).resolve().parent.parent / "models" / BUNDLED
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*"]


class NoModel(ValueError):
    """MODEL names nothing that could be served; the message is one line."""


def find(model: str = BUNDLED) -> Path:
    """The folder of a checkpoint, fetched first where `model` is a hub name. `NoModel`.

    `BUNDLED` is the bundled model even where a folder of that name exists: ./demo is the folder.
    """
    if model == BUNDLED:
        return SHIPPED
    if _is_on_hub(model):
        return download(model, WANTED_FILES)
    return Path(model).expanduser().absolute()


def default_name(model: str) -> str:
    """What clients call a model that is given no name: its folder's name, or its hub name."""
    if _is_on_hub(model):
        return model
    return Path(os.path.abspath(Path(model).expanduser())).name or model


def _is_on_hub(model: str) -> bool:
    return bool(HUB_NAME.fullmatch(model)) and not Path(model).expanduser().exists()


def download(model: str, wanted: list[str], folder: Path | None = None) -> Path:
    """Fetches a hub's files that match `wanted`; into its cache, or into `folder`. `NoModel`."""
    # Here, not above: seldom needed, and slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=wanted, local_dir=folder))
    except HfHubHTTPError as error:
        reason = f"the hub refuses it ({error.response.status_code})"
    except (LocalEntryNotFoundError, OSError):
        reason = "the hub cannot be reached, and no copy of it is kept here"
    except ValueError as error:
        reason = " ".join(str(error).split())
    raise NoModel(f"{model} is no folder here, and {reason}")


def check(folder: Path, with_weights: bool = True) -> None:
    """That the checkpoint is whole and of a known kind, as far as can be told without torch.

    Its weights may be looked at by those who load them only.

    Raises `BadCheckpoint` or `UnsupportedModel`, each with a line for the user.
    """
    check_config(folder)
    if not with_weights:
        _check_there(folder / "tokenizer.json")
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadCheckpoint(f"{index} has no sound weight_map: download it again")
        files = sorted({str(name) for name in weight_map.values()})
    else:
        files = ["model.safetensors"]
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
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(
            f"{path} is corrupt or half-copied ({error}): copy or download it again"
        ) from None
