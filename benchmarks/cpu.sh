#!/bin/bash
# Every CPU figure of docs/performance.md in one run: benchmarks/cpu.sh [OUT], OUT a folder for the JSON files
# (default benchmarks/results). Wants the machine for itself, about 20 minutes on two cores. Needs the package installed
# or built in place; the C++ tables need cmake, ninja and pybind11, the MPI columns openmpi-bin, mpich, their -dev
# packages and mpi4py (what is absent is left out and said). Goes on when a part fails; the exit code is the number of
# parts that did.
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-benchmarks/results}
python=${PYTHON:-python}
build=build/bench
failed=0
mkdir -p "$out"

part() {
  local name=$1
  shift
  printf '\n== %s (load %s)\n' "$name" "$(cut -d' ' -f1 /proc/loadavg)"
  "$@" || {
    echo "$name failed with $?"
    failed=$((failed + 1))
  }
}

build_cpp() {
  cmake -S . -B "$build" -G Ninja -DHDPCOMM_BUILD_BENCHMARKS=ON -DHDPCOMM_CUDA=OFF -DCMAKE_BUILD_TYPE=Release \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$(command -v "$python")" >"$build.log" 2>&1 &&
    cmake --build "$build" --target latency collectives >>"$build.log" 2>&1
}

mkdir -p build
cpp=()
if build_cpp; then
  cpp=(--cpp "$build")
else
  echo "the C++ benchmarks were not built (see $build.log): their tables are left out"
fi
part "point to point" "$python" benchmarks/p2p.py --json "$out/p2p.json"
part "torch.distributed" "$python" benchmarks/torch_backend.py --json "$out/torch_backend.json"
part "subsets" "$python" benchmarks/subsets.py --json "$out/subsets.json"
part "counters" "$python" benchmarks/counter.py --json "$out/counter.json"
part "collectives, 2 ranks" "$python" benchmarks/collectives.py "${cpp[@]}" --ranks 2 --rounds 5 --json "$out/collectives-2.json"
# MPICH spins without end where ranks share cores.
part "collectives, 4 ranks" "$python" benchmarks/collectives.py "${cpp[@]}" --ranks 4 --rounds 5 --peers gloo openmpi \
  --json "$out/collectives-4.json"
part "attention" "$python" benchmarks/attention.py --ranks 2 --packs 16384 8192,4096,4096 64x256 --repeat 5 \
  --json "$out/attention.json"
part "errors" "$python" benchmarks/faults.py --json "$out/faults.json"
part "planner" "$python" benchmarks/planner.py --json "$out/planner.json"
part "closed loop" "$python" benchmarks/closed_loop.py --json "$out/closed_loop.json"
part "simulator" "$python" benchmarks/sim_vs_real.py --json "$out/sim_vs_real.json"
exit "$failed"
