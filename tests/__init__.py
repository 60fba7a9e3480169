"""The tests of hdpcomm. This is imported before torch: OpenMP reads the environment once."""

import os

# Ranks share the cores with each other and with other tests. More threads than cores, or threads that spin while they
# wait for one that does not run, slow a busy machine down many times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
