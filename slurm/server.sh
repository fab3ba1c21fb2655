#!/usr/bin/env bash
# One SGLang server; its address appears in the directory $1 once it answers.
set -uo pipefail
cd "${R3TRAIN_ROOT:?}" || exit 1
directory=$1
shift
exec "${BIN:?}/r3train" serve --host "${SLURMD_NODENAME:-127.0.0.1}" --index "${SLURM_PROCID:-0}" \
    --local-index "${SLURM_LOCALID:-0}" --address-file "$directory/${SLURM_PROCID:-0}.addr" "$@"
