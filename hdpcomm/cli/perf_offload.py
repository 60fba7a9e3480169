"""``hdpcomm perf offload``: measures the bandwidth to host memory."""

from __future__ import annotations

import argparse

from hdpcomm.cli.output import check_writable, refuse_others, write_json
from hdpcomm.errors import InvalidUsage

__all__ = ["measure_offload"]

_SWEEP = ("minbytes", "maxbytes", "stepbytes", "stepfactor", "iters", "warmup_iters")
_USED = frozenset(("op", *_SWEEP, "output_file", "device"))


def measure_offload(options: argparse.Namespace, defaults: argparse.Namespace) -> int:
    """Prints a row for each size, and writes the file. ``defaults``: the options without any arguments.

    Raises:
        InvalidUsage: an option that has no meaning for copies to host memory.
    """
    import torch

    from hdpcomm.perf.config import PerfConfig
    from hdpcomm.perf.ops.host_copies import COLUMNS, offload_rates, row_of

    refuse_others(options, defaults, _USED, "offload is one rank's copies")
    largest = options.maxbytes if options.maxbytes is not None else max(32 << 20, options.minbytes)
    config = PerfConfig(
        op="offload",
        min_bytes=options.minbytes,
        max_bytes=largest,
        step_bytes=1 << 20 if options.stepbytes is None else options.stepbytes,
        step_factor=1 if options.stepfactor is None else options.stepfactor,
    )
    sizes = list(config.sizes())
    if sizes[0] < 1:
        raise InvalidUsage("-b 0: a copy has at least one byte")
    if options.output_file is not None:
        check_writable(options.output_file)
    device = options.device or ("cuda" if torch.cuda.is_available() else "sim")
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") and torch.cuda.is_available() else device
    rows = []
    print(f"# device {device} ({name}); GB/s; plain: the bare copy, fresh: a new pinned buffer for each")
    print("".join(f"{heading:>12}" for heading, _ in COLUMNS))
    for rates in offload_rates(device, sizes, iterations=options.iters, warmup=options.warmup_iters):
        rows.append(row_of(rates))
        size, *own = rows[-1].values()
        print("".join([f"{size:>12.0f}", *(f"{rate:>12.2f}" for rate in own)]), flush=True)
    if options.output_file is not None:
        write_json(options.output_file, {"op": "offload", "device": device, "name": name, "unit": "GB/s", "rows": rows})
    return 0
