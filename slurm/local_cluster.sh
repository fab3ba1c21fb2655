#!/usr/bin/env bash
# A real Slurm on loopback, for tests: munged, slurmctld and a slurmd a node, all files in one
# directory, apart from the machine's own Slurm.  NODES (1) nodes, named by their addresses
# 127.0.0.1, 127.0.0.2, ..., each with all of the machine's cores.
#
#   slurm/local_cluster.sh install DIR   Debian's slurm-wlm and munge, where they are missing
#   slurm/local_cluster.sh start DIR     installs too; then: export SLURM_CONF=DIR/slurm.conf
#   slurm/local_cluster.sh stop DIR
#
# Needs root.
set -euo pipefail
[[ $# -eq 2 && $1 =~ ^(install|start|stop)$ ]] ||
    { echo "usage: $0 install|start|stop DIR" >&2; exit 2; }
action=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
export SLURM_CONF=$dir/slurm.conf

stop() {
    local file pid
    for file in "$dir"/slurmd-*.pid "$dir"/{slurmctld,munged}.pid; do
        [[ -s $file ]] || continue
        pid=$(<"$file")
        kill -TERM "$pid" 2>/dev/null || true
        for _ in $(seq 50); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.2
        done
        kill -KILL "$pid" 2>/dev/null || true
        rm -f "$file"
    done
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

if [[ $action == stop ]]; then
    scancel --quiet --state=RUNNING 2>/dev/null || true
    stop
    exit 0
fi

[[ $(id -u) -eq 0 ]] || { echo "$0: needs root" >&2; exit 1; }
missing=""
for program in slurmctld slurmd munged sbatch; do
    command -v "$program" >/dev/null || missing=1
done
if [[ -n $missing ]]; then
    export DEBIAN_FRONTEND=noninteractive
    # keep the packages from starting their daemons on the machine
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    {
        timeout 120 apt-get update -qq &&
            timeout 240 apt-get install -y -qq --no-install-recommends slurm-wlm munge
    } >"$dir/apt.log" 2>&1 || { tail -n 5 "$dir/apt.log" >&2; exit 1; }
fi
[[ $action == install ]] && exit 0
stop
host=$(hostname -s)
NODES=${NODES:-1}
mkdir -p "$dir"/{state,log,munge}
memory=$(awk '/MemTotal/ {print int($2 / 1200)}' /proc/meminfo)
node_lines() {
    local i
    for ((i = 1; i <= NODES; i++)); do
        mkdir -p "$dir/spool-127.0.0.$i"
        echo "NodeName=127.0.0.$i NodeHostname=$host NodeAddr=127.0.0.$i Port=$(free_port)" \
            "CPUs=$(nproc --all) RealMemory=$((memory / NODES)) State=UNKNOWN"
    done
}
chmod 700 "$dir/munge"
[[ -s $dir/munge/key ]] || (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
cat >"$SLURM_CONF" <<EOF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
AuthType=auth/munge
# a requeued job waits until its old credential expires: two minutes by default
AuthInfo=socket=$dir/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
MpiDefault=none
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmdSpoolDir=$dir/spool-%n
StateSaveLocation=$dir/state
SlurmUser=root
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
$(node_lines)
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
EOF
munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
    --pid-file="$dir/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"
slurmctld -f "$SLURM_CONF"
for ((i = 1; i <= NODES; i++)); do
    slurmd -f "$SLURM_CONF" -N "127.0.0.$i"
done
for _ in $(seq 60); do
    state=$(sinfo --noheader --format=%T 2>/dev/null || true)
    [[ $state == idle ]] && { echo "$NODES node(s), idle; export SLURM_CONF=$SLURM_CONF"; exit 0; }
    sleep 0.5
done
echo "the nodes are ${state:-unknown} after 30 s:" >&2
tail -n 5 "$dir"/log/*.log >&2
stop
exit 1
