#!/usr/bin/env bash
# One node's torchrun.  When the file $STOP_FILE appears, this script sends SIGUSR1 to the ranks (torchrun
# would kill them before they have saved): they save and end with 0, and torchrun ends with them.
#
# Slurm sends SIGTERM (scancel, preemption) to every process of the step.  The ranks save.  This script
# and torchrun ignore it, because Slurm kills the rest of the step when they end.
set -uo pipefail
cd "${R3TRAIN_ROOT:?}" || exit 1

args=(--signals-to-handle SIGINT,SIGHUP,SIGQUIT)
for arg in "$@"; do
    arg="${arg//\$SLURM_NODEID/${SLURM_NODEID:-0}}"
    args+=("${arg//\$/\$\$}") # torchrun puts $ for $$, and a rank's number for $local_rank, in every word
done
(
    trap '' TERM # inherited; the ranks handle TERM again
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
