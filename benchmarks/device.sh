#!/usr/bin/env bash
# Runs the checks that need a device, within eight minutes: benchmarks/device.sh [cuda]. The
# environment needs PyTorch, JAX or both. Each part has a time limit, and the next part runs even if
# a part fails. Logs and tables of costs are written to $OUT (default: benchmarks/results). Use `cpu`
# to test the script itself. For a machine without access to a package index, first run
# `pip download --no-deps -d build/wheels array-api-compat`.
set -uo pipefail
cd "$(dirname "$0")/.."
DEVICE=${1:-cuda} PYTHON=${PYTHON:-python} OUT=${OUT:-benchmarks/results}
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
FAILED=0
mkdir -p "$OUT"

part() { # name, seconds, command
    local log="$OUT/device_${DEVICE}_$1.log" start=$SECONDS
    timeout "$2" "${@:3}" >"$log" 2>&1
    local status=$?
    [ "$status" -eq 0 ] || FAILED=1
    echo "$1: exit status $status after $((SECONDS - start)) s; $(tail -n 1 "$log")"
}

"$PYTHON" -c "import array_api_compat" 2>/dev/null \
    || "$PYTHON" -m pip install --quiet --no-index --find-links build/wheels array-api-compat
"$PYTHON" -m gradtools backends
part check 150 "$PYTHON" -m gradtools check
part tests 120 "$PYTHON" -m pytest -q -p no:cacheprovider tests/torch/test_cuda.py
part cost 180 "$PYTHON" benchmarks/cost.py --device "$DEVICE"
for table in "benchmarks/results/cost_$DEVICE".*; do
    [ -e "$table" ] && [ "$OUT" != benchmarks/results ] && cp "$table" "$OUT"
done
exit $FAILED
