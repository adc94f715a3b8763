"""`python -S bench/peak.py COMMAND...`: run it, then print its seconds and peak KiB to stderr.

A small process of its own, because the kernel counts what a parent held at the fork as the child's.
"""

import os
import sys
import time

if __name__ == "__main__":
    started = time.perf_counter()
    child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
    _, status, usage = os.wait4(child, 0)
    sys.stderr.write(f"\n{time.perf_counter() - started} {usage.ru_maxrss}\n")
    sys.exit(os.waitstatus_to_exitcode(status))
