#!/usr/bin/env bash
# One node's torchrun.  When the file $STOP_FILE appears, its ranks get SIGUSR1, and not torchrun,
# which would cut their last words short: they save, end with 0, and torchrun with them.
#
# Slurm's own SIGTERM (scancel, preemption) goes to every process of the step.  The ranks save on it,
# and this script and torchrun outlive it: the step is over, and killed, when they end.
set -uo pipefail
cd "${R3TRAIN_ROOT:?}" || exit 1

args=(--signals-to-handle SIGINT,SIGHUP,SIGQUIT)
for arg in "$@"; do
    args+=("${arg//\$SLURM_NODEID/${SLURM_NODEID:-0}}")
done
(
    trap '' TERM # inherited; the ranks take it back
    exec "${BIN:?}/torchrun" "${args[@]}"
) &
agent=$!
trap 'echo "got TERM: the ranks save and end" >&2' TERM

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
