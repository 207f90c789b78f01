"""The checkpoint that MODEL names: found, or fetched, and looked through before anything starts."""

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from penstock.workers.models.config import BadCheckpoint, read_json
from penstock.workers.models.spec import check_config

SHIPPED = Path(__file__).resolve().parent.parent / "models" / "demo"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*"]


class NoModel(ValueError):
    """MODEL names nothing that could be served; the message is one line."""


def find(model: str | None) -> Path:
    """The folder of a checkpoint, fetched first where `model` is a hub name. `NoModel`."""
    if model is None:
        return SHIPPED
    folder = Path(model).expanduser()
    if folder.exists() or not HUB_NAME.fullmatch(model):
        return folder.absolute()
    return download(model, WANTED_FILES)


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
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise BadCheckpoint(f"{index} has no sound weight_map: download it again")
        files = sorted({str(name) for name in places.values()})
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
