#!/bin/sh
# The same command on both hosts; ranks of a host share memory, between hosts frames go over a process group of torch.
#   examples/two_hosts.sh HOST_OF_RANK_0 NODE_NUMBER [hdpcomm train options]
#   host a: examples/two_hosts.sh a 0 --data corpus --out /shared/run --save-every 100 --resume auto
#   host b: examples/two_hosts.sh a 1 --data corpus --out /shared/run --save-every 100 --resume auto
set -e
address=$1
node=$2
shift 2
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${RANKS_PER_HOST:-4}" --node-rank "$node" \
  --master-addr "$address" --master-port "${PORT:-29500}" -m hdpcomm.cli.main train "$@"
