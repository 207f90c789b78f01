"""Reads the sliding window of each layer: the number of visible positions, or 0 for all."""

from collections.abc import Callable

from penstock.workers.models.config import Config, Fields


def read_windows(config: Fields, windows_of: Callable[[Config], list[int]]) -> tuple[int, ...]:
    """Return the window of each layer; raise BadCheckpoint if a value is invalid.

    `windows_of` is a function of this module.
    """
    try:
        windows = tuple(windows_of(config.values))
    except (TypeError, ZeroDivisionError):
        # These calls raise BadCheckpoint if their key is the cause, also if its value is null.
        for key, least in (("max_window_layers", 0), ("sliding_window_pattern", 1)):
            if key in config.values:
                config.at_least(key, least)
        raise config.bad("layer_types", "a list with the type of each layer") from None
    num_layers = config.size("num_hidden_layers")
    if len(windows) != num_layers:
        raise config.bad("layer_types", f"a list of {num_layers} entries (num_hidden_layers)")
    if any(type(window) is not int or window < 0 for window in windows):
        raise config.bad("sliding_window", "a whole number of 0 or more")
    return windows


def no_window(config: Config) -> list[int]:
    return [0] * config["num_hidden_layers"]


def every_layer(config: Config) -> list[int]:
    return [config.get("sliding_window") or 0] * config["num_hidden_layers"]


def upper_layers(config: Config) -> list[int]:
    """Return the window of each layer.

    Without `layer_types`, the layers from `max_window_layers` on have a window.
    """
    num_layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return [0] * num_layers
    window = config.get("sliding_window", 4096) or 0
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return [window if layer >= first else 0 for layer in range(num_layers)]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def alternating(period: int) -> Callable[[Config], list[int]]:
    """Return a function from a configuration to the window of each layer.

    Without `layer_types`, all layers except every n-th have a window. n is the configuration's
    `sliding_window_pattern`, by default `period`.
    """

    def windows(config: Config) -> list[int]:
        window = config.get("sliding_window") or 0
        kinds = config.get("layer_types")
        if kinds is None:
            every = config.get("sliding_window_pattern", period)
            layers = range(1, config["num_hidden_layers"] + 1)
            return [window if layer % every else 0 for layer in layers]
        return [window if kind == "sliding_attention" else 0 for kind in kinds]

    return windows


def every_layer_if_used(config: Config) -> list[int]:
    return every_layer(config) if config.get("use_sliding_window") else no_window(config)


def alternate_lower_layers(config: Config) -> list[int]:
    """Return the window of each layer.

    Without `layer_types`, every even layer below `max_window_layers` has a window.
    """
    if not config.get("use_sliding_window"):
        return no_window(config)
    window = config.get("sliding_window", 4096) or 0
    kinds = config.get("layer_types")
    if kinds is None:
        last = config.get("max_window_layers", 28)
        layers = range(config["num_hidden_layers"])
        return [window if layer % 2 == 0 and layer < last else 0 for layer in layers]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
