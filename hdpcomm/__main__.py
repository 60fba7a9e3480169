"""``python -m hdpcomm``: the command, for launchers that start modules (torchrun -m hdpcomm perf ...)."""

import sys

from hdpcomm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
