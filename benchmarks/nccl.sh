#!/bin/bash
# Subset collectives on two or more GPUs: hdpcomm over one NCCL communicator beside communicators of ncclCommSplit, in
# time and memory. usage: benchmarks/nccl.sh [OUT]: nccl.json and the table go to the folder OUT (default build/nccl).
# Wants the package installed or built in place, and a torch with NCCL. Several hosts: run it on each, with
# TORCHRUN="--nnodes 2 --node-rank N --master-addr HOST --master-port 29500".
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/nccl}
python=${PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
if [ "$gpus" -lt 2 ] && [ -z "${TORCHRUN:-}" ]; then
  echo "benchmarks/nccl.sh needs 2 GPUs or more, and torch sees $gpus; look at nvidia-smi and CUDA_VISIBLE_DEVICES" >&2
  exit 2
fi
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# shellcheck disable=SC2086  # several words
timeout 540 "$python" -m torch.distributed.run ${TORCHRUN:---standalone} --nproc-per-node "$gpus" \
  benchmarks/nccl.py --json "$out/nccl.json" | tee "$out/nccl.md"
exit "${PIPESTATUS[0]}"
