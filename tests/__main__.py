"""``python -m tests ...``: as ``pytest ...``, but processes of ``-n`` are forked from one that has imported torch."""

from __future__ import annotations

import importlib
import sys

from tests.warm_children import fork_python_programs
from tests.warm_python import PRELOAD, run_child

if __name__ == "__main__":
    for module in ("hdpcomm.comm.launch", *PRELOAD):
        importlib.import_module(module)
    fork_python_programs(run_child)
    import pytest

    sys.exit(pytest.main())
