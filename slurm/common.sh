# Shared by the batch scripts: settings from the environment, signals, requeue, teardown.
#
# A job takes whole nodes (--exclusive, --mem=0): otherwise Slurm gives one task a node one core, and
# a step of two servers none.  --cpu-bind=none lets the ranks and servers of a task use all cores.
# Source this file, do not run it.  R3TRAIN_ROOT is the checkout on a file system that all nodes see.

set -uo pipefail

# if set, print the commands instead of running them (to check a big job)
RENDER=${RENDER:-}
if [[ -n $RENDER ]]; then # away from Slurm too, whose variables have stand-ins
    SLURM_SUBMIT_DIR=${SLURM_SUBMIT_DIR:-$PWD}
    SLURM_JOB_ID=${SLURM_JOB_ID:-1}
    SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES:-2}
fi
node_names() {
    if [[ -n $RENDER && -z ${SLURM_JOB_NODELIST:-} ]]; then
        seq -f node%02g "$SLURM_JOB_NUM_NODES"
    else
        scontrol show hostnames "${SLURM_JOB_NODELIST:?}"
    fi
}
R3TRAIN_ROOT=${R3TRAIN_ROOT:-${SLURM_SUBMIT_DIR:?submit from the checkout, or set R3TRAIN_ROOT}}
# an image for every step: a file for apptainer (.sif), anything else is pyxis' (enroot)
CONTAINER=${CONTAINER:-}
# further directories that the steps see under their own names, with commas between: models, data
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-}
BIN=${BIN:-$([[ -n $CONTAINER ]] && echo /usr/local/bin || echo "$R3TRAIN_ROOT/.venv/bin")}
CONFIG=${CONFIG:-configs/tiny_cpu.toml}
RUN_DIR=${RUN_DIR:-$R3TRAIN_ROOT/runs/slurm-${SLURM_JOB_ID:?}}
# a relative one is below the checkout; no symbolic link is followed
RUN_DIR=$(cd "$R3TRAIN_ROOT" && realpath -ms -- "$RUN_DIR")
# the tensor-parallel size of each SGLang server; unset, the recipe's
GPUS_PER_SERVER=${GPUS_PER_SERVER:-}
SAVE_INTERVAL=${SAVE_INTERVAL:-}
# the signal comes this long before the end of the job; the ranks get a little less
SIGNAL_GRACE_S=${SIGNAL_GRACE_S:-100}
START=${SLURM_RESTART_COUNT:-0}
LOGS=$RUN_DIR/logs/slurm-${SLURM_JOB_ID:?}-start$START
# the job's number makes the ports of two jobs on a node differ; they lie below those of servers
# (20000 to 31999) and of outgoing connections (from 32768 on)
RDZV_PORT=${RDZV_PORT:-$((10000 + SLURM_JOB_ID % 10000))}

export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export R3TRAIN_ROOT BIN
# the key of this start's servers; its steps get it only by their environment
R3TRAIN_ENGINE_API_KEY=${R3TRAIN_ENGINE_API_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export R3TRAIN_ENGINE_API_KEY

STOPPED=""
STEPS=()

# Refuse an impossible setting before anything starts.
refuse() {
    echo "$*" >&2
    exit 2
}
require_count() {
    [[ ${!1} =~ ^[1-9][0-9]*$ ]] || refuse "$1 is ${!1}: expected a number above 0"
}
[[ -z $GPUS_PER_SERVER ]] || require_count GPUS_PER_SERVER
config_file=""
for file in "$R3TRAIN_ROOT/configs/$CONFIG.toml" "$CONFIG" "$R3TRAIN_ROOT/$CONFIG"; do
    [[ ! -f $file ]] || config_file=$file
done
[[ -n $config_file ]] ||
    refuse "CONFIG is $CONFIG: no such file or recipe (r3train recipes lists them)"
[[ -n $CONTAINER || -z $CONTAINER_MOUNTS ]] ||
    refuse "CONTAINER_MOUNTS is without effect without CONTAINER"
# Words between srun's flags and the command of a step.  Directories keep their names in the container.
container=()
# Set them, once RUN_DIR is final; arguments are further directories that the steps see.
use_container() {
    [[ -n $CONTAINER ]] || return 0
    local mounts=$R3TRAIN_ROOT:$R3TRAIN_ROOT directory
    for directory in "$RUN_DIR" ${CONTAINER_MOUNTS//,/ } "$@"; do
        [[ ,$mounts, == *",$directory:$directory,"* ]] || mounts+=,$directory:$directory
    done
    if [[ $CONTAINER == *.sif ]]; then
        container=(apptainer exec --nv --bind "$mounts" --pwd "$R3TRAIN_ROOT" "$CONTAINER")
    else
        container=(--container-image="$CONTAINER" --container-mounts="$mounts"
            --container-workdir="$R3TRAIN_ROOT")
    fi
    # this checkout's code, not the image's
    export PYTHONPATH=$R3TRAIN_ROOT${PYTHONPATH:+:$PYTHONPATH}
}
# GPUs of this node, and so of every node; 0 if Slurm knows of none
node_gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}
node_gpus=${node_gpus##*:} # h100:8
# a rank for each GPU that no server beside the ranks takes; on cores alone 2
NPROC_PER_NODE=${NPROC_PER_NODE:-$((node_gpus ? node_gpus - ${own_gpus:-0} : 2))}
# On cores alone ranks and servers take one thread each.  On GPUs torchrun says so, and a rank whose Adam is on
# the host takes its share of the cores, unless this is set.
((node_gpus)) || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Check that one node holds the ranks and their server.  train_async.py puts the server on the GPUs
# behind the ranks' and checks again, because the recipe may name servers elsewhere.
own_server_flags=()
server_beside_ranks() {
    [[ -n $GPUS_PER_SERVER ]] || return 0
    require_count NPROC_PER_NODE # torchrun's gpu and auto would leave the server no GPU
    local both=$((NPROC_PER_NODE + GPUS_PER_SERVER))
    ((node_gpus == 0 || both <= node_gpus)) ||
        refuse "$NPROC_PER_NODE ranks and a server of $GPUS_PER_SERVER GPUs take $both, and a node has" \
            "$node_gpus: lower NPROC_PER_NODE or GPUS_PER_SERVER"
    own_server_flags=(--sglang-tp-size "$GPUS_PER_SERVER")
}

# Refuse what the ranks would refuse, before servers load for minutes: flags, ranks on so many nodes that the recipe's
# parallel sizes do not divide, servers on GPUs that the ranks take or that no node has, a reward that cannot be
# imported.  Where r3train is in a container only, the ranks do.  Arguments: nodes that train, flags of train_async.py.
check_topology() {
    [[ -x $BIN/r3train && -x $BIN/python && $NPROC_PER_NODE =~ ^[0-9]+$ ]] || return 0
    "$BIN/python" - "$node_gpus" "$NPROC_PER_NODE" "$@" <<'EOF' || exit 2
import sys

from r3train.config.cross_checks import check_static
from r3train.config.options import parse_train_flags
from r3train.launch.gpus import server_gpus
from r3train.user_code import find_modules_here, import_user_code

gpus, ranks, nodes = map(int, sys.argv[1:4])
try:
    config = parse_train_flags(sys.argv[4:], prog_name="train_async.py")
    check_static(config, ranks * nodes)
    server_gpus(config, num_ranks=ranks, num_visible=gpus)
    find_modules_here()
    if config.data.custom_rm_path is not None:
        import_user_code("--custom-rm-path", config.data.custom_rm_path)
except Exception as error:
    sys.exit(f"{nodes} x {ranks} ranks: {error}")
EOF
}

# Start a command in the background and remember it for signals and teardown.
step() {
    if [[ -n $RENDER ]]; then
        printf '%q ' "$@"
        echo
        return
    fi
    "$@" &
    STEPS+=($!)
}

# Pass Slurm's warning signal on to the ranks, which save and end.  It goes by a file: srun would send
# the signal to every process of a step, and it would kill SGLang.
STOP_FILE=$LOGS/stop
tell_ranks() {
    STOPPED=$1
    echo "$(date -u +%FT%TZ) got $1: the ranks save and end" >&2
    echo "$1" >"$STOP_FILE"
}

# Wait for a step and print nothing; a trap only interrupts the wait.
finish() {
    local code
    while :; do
        wait "$1"
        code=$?
        kill -0 "$1" 2>/dev/null || return $code
    done
}

# End all started commands: SIGTERM first, SIGKILL after 30 s.
teardown() {
    local pid waited
    for pid in "${STEPS[@]}"; do
        kill -TERM "$pid" 2>/dev/null
    done
    for ((waited = 0; waited < 60; waited++)); do
        local alive=""
        for pid in "${STEPS[@]}"; do
            kill -0 "$pid" 2>/dev/null && alive=1
        done
        [[ -z $alive ]] && return
        sleep 0.5
    done
    for pid in "${STEPS[@]}"; do
        kill -KILL "$pid" 2>/dev/null
    done
}

# Requeue a run that was stopped early and has saved; its next start resumes.
requeue_if_stopped() {
    local code=$1
    if [[ $STOPPED == USR1 && $code -eq 0 ]]; then
        echo "$(date -u +%FT%TZ) saved after $STOPPED: back into the queue" >&2
        scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this script meanwhile
        return 75                                    # not requeued: unfinished is no success
    fi
    return "$code"
}

# a static rendezvous on loopback: torchrun's other one runs code from whoever reaches its port
one_node=(--master-addr 127.0.0.1 --master-port "$RDZV_PORT")
torchrun_flags=(
    --nproc-per-node "$NPROC_PER_NODE"
    --log-dir "$LOGS/node-\$SLURM_NODEID"
    --tee 3
    --local-ranks-filter 0
)
train_flags=(
    train_async.py
    --config "$CONFIG"
    --run-dir "$RUN_DIR"
    --no-progress
    --auto-resume
    --signal-grace-s "$SIGNAL_GRACE_S"
)

# checkpoints are where the recipe has them, so that the next job goes on from them
if ! grep -qE '^save *=' "$config_file"; then
    train_flags+=(--save "$RUN_DIR/checkpoints")
    SAVE_INTERVAL=${SAVE_INTERVAL:-20}
fi
[[ -z $SAVE_INTERVAL ]] || train_flags+=(--save-interval "$SAVE_INTERVAL")

cd "$R3TRAIN_ROOT" || exit 1
if [[ -z $RENDER ]]; then
    (umask 077 && mkdir -p "$LOGS")
    rm -f "$STOP_FILE"
    export STOP_FILE
    trap teardown EXIT
    trap 'tell_ranks USR1' USR1
    trap 'tell_ranks TERM' TERM
fi
