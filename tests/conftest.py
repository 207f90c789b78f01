"""What holds for every test, and every process that one starts."""

import os

# Small products gain nothing from threads, and threads that wait for each other on a busy machine
# cost tenfold. Set before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
