"""Set before any test module imports numpy, torch or gRPC."""

import os

# Two cores are shared by the workers of one run and by the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
