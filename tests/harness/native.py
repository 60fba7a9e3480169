"""``hdpcomm.testing._native``: what only tests need, and only test builds have."""

from __future__ import annotations

try:
    from hdpcomm.testing import _native as _testing
except ImportError as error:
    raise ImportError(
        f"hdpcomm.testing._native is not there ({error}): build with -DHDPCOMM_TESTING=ON, as `make build` does, or "
        "CMAKE_ARGS=-DHDPCOMM_TESTING=ON pip install --no-build-isolation -e ."
    ) from error

__all__ = ["_testing"]
