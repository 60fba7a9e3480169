#!/usr/bin/env bash
# Everything that needs a GPU, offline, in under 9 minutes: builds, tests, compute-sanitizer, benchmarks (docs/gpu.md).
# usage: benchmarks/gpu.sh [OUT] [--only PART ...]: gpu.json and gpu.log go to the directory OUT (default: build/gpu)
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu/main.py" "$@"
