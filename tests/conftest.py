"""What holds for every test, and every process that one starts."""

import os

# Small products gain nothing from threads, and threads that wait for each other on a busy machine
# cost tenfold. Set before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a machine with a GPU may have little: see docs/gpu.md
    pass
else:
    # A busy machine is slow, which is no fault of what is tested.
    settings.register_profile(
        "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")
