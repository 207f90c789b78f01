"""Settings of a helper process, which the router sends before the first job."""

import json
from dataclasses import asdict, dataclass, field

from penstock.common.text.chat_source import ChatSource
from penstock.router.config import HelperLimits, RequestBounds


@dataclass(frozen=True, slots=True)
class HelperSettings:
    """The limits of a helper process, and the data that its jobs need."""

    chat: ChatSource | None = None  # the model's chat template, or None if the model has none
    limits: HelperLimits = field(default_factory=HelperLimits)
    bounds: RequestBounds = field(default_factory=RequestBounds)


def encode_settings(settings: HelperSettings) -> bytes:
    """Return settings as JSON."""
    return json.dumps(asdict(settings)).encode()


def decode_settings(data: bytes) -> HelperSettings:
    """Decode settings from the JSON of `encode_settings`."""
    content = json.loads(data)
    chat = content["chat"]
    if chat is not None:
        chat = ChatSource(**{**chat, "control_tokens": tuple(chat["control_tokens"])})
    return HelperSettings(
        chat, HelperLimits(**content["limits"]), RequestBounds(**content["bounds"])
    )
