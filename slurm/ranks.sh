#!/usr/bin/env bash
# One node's torchrun.  When the file $STOP_FILE appears, its ranks get SIGUSR1, and not torchrun,
# which would cut their last words short: they save, end with 0, and torchrun with them.
set -uo pipefail
cd "${R3TRAIN_ROOT:?}" || exit 1

args=()
for arg in "$@"; do
    args+=("${arg//\$SLURM_NODEID/${SLURM_NODEID:-0}}")
done
"${BIN:?}/torchrun" "${args[@]}" &
agent=$!

told=""
while kill -0 "$agent" 2>/dev/null; do
    if [[ -z $told && -e ${STOP_FILE:-/nonexistent} ]]; then
        told=1
        for pid in $(pgrep -P "$agent"); do
            kill -USR1 "$pid"
        done
    fi
    sleep 1
done
wait "$agent"
