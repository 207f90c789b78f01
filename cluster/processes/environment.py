"""Chooses the environment variables that a local Ray, routers and workers inherit.

The shell that runs `penstock serve` may hold secrets, such as tokens of cloud accounts. Routers and
workers handle requests of clients, so they get only variables that are known to be settings.
"""

from collections.abc import Collection, Mapping

NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "HF_HOME"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
    }
)
PREFIXES = (
    *("LC_", "PYTHON", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    *("MALLOC_", "NUMBA_", "TRITON_", "TORCH_", "PYTORCH_", "RAY_", "PENSTOCK_"),
)
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Routers and workers download nothing, because `penstock serve` has already fetched the model."""


def child_environment(
    wanted: Mapping[str, str],
    inherited: Mapping[str, str],
    pass_env: Collection[str] = (),
    secret: Collection[str] = (),
) -> dict[str, str]:
    """Return the environment of a process that Ray starts.

    Args:
        wanted: the environment with which Ray would start the process.
        inherited: the environment of this process. A variable that has another value in `wanted`
            was set by Ray, so it is passed on.
        pass_env: names of further variables to pass on.
        secret: names of variables with API keys. They are never passed on.
    """
    passed = {
        name: value
        for name, value in wanted.items()
        if name not in secret
        and (
            inherited.get(name) != value
            or name in NAMES
            or name in pass_env
            or name.startswith(PREFIXES)
        )
    }
    return {**passed, **OFFLINE}
