#!/usr/bin/env bash
# One SGLang server, or one node's part of it; its address appears in the directory $1 once it answers.
# NODES_PER_SERVER tasks in a row are one server, and meet at their part of SERVERS_MEET (commas between).
set -uo pipefail
cd "${R3TRAIN_ROOT:?}" || exit 1
directory=$1
shift
task=${SLURM_PROCID:-0}
nodes=${NODES_PER_SERVER:-1}
server=$((task / nodes))
if ((nodes > 1)); then
    IFS=, read -ra meet <<<"${SERVERS_MEET:?}"
    set -- --sglang-nnodes "$nodes" --sglang-node-rank $((task % nodes)) \
        --sglang-dist-init-addr "${meet[server]}" "$@"
fi
exec "${BIN:?}/r3train" serve --host "${SLURMD_NODENAME:-127.0.0.1}" --index "$server" \
    --local-index "${SLURM_LOCALID:-0}" --address-file "$directory/$server.addr" "$@"
