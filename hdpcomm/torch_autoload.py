"""Called by ``import torch`` where hdpcomm is installed: the entry point ``hdpcomm`` of the group ``torch.backends``.

It registers the name ``hdpcomm`` with torch.distributed, and the backend itself is imported with the first group, so
that programs that do without hardly pay for it. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off; then ``import
hdpcomm.torch_backend`` registers the backend.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

_NAME = "hdpcomm"


def register() -> None:
    """Makes the backend known to torch.distributed, if this torch has it. Local, idempotent."""
    import torch.distributed as dist

    if dist.is_available() and _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from hdpcomm.torch_backend import create_group

    return create_group(options, backend_options)
