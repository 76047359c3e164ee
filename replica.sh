#!/usr/bin/env bash
# How one replica is started: vLLM, or offline/stub_vllm.py, which takes the same flags; adapters are loaded at runtime.
#
# Dead-man switch: a trainer writes a new *.heartbeat every few seconds. When there is no new one for
# IDLE_SHUTDOWN_MIN minutes, this replica stops itself and exits 0, so a lost launcher never leaves a GPU billing. It
# compares contents, by its own clock: the times of a mounted file may be another machine's, or old.
#   MODEL=Qwen/Qwen2.5-Math-1.5B HEARTBEATS=/lora/<run>/attempts bash replica.sh
#
# The engine's death ends the script with the engine's exit code, or 1; SIGTERM and SIGINT end the engine.
set -euo pipefail

: "${MODEL:?set MODEL to a Hub name or a model directory}"
DTYPE=${DTYPE:-bfloat16}
HOST=${HOST:-0.0.0.0}
PORT=${PORT:-8000}
MAX_MODEL_LEN=${MAX_MODEL_LEN:-4096} # prompt and completion together
MAX_LORA_RANK=${MAX_LORA_RANK:-8}    # 1, 8, 16, 32, 64, 128, 256, 320 or 512
MAX_LORAS=${MAX_LORAS:-6}            # adapters that can be in one batch: max_staleness + 2
ENGINE=${ENGINE:-vllm}               # vllm or stub
HEARTBEATS=${HEARTBEATS:-}           # directory of the run's *.heartbeat files; empty: no dead-man switch
IDLE_SHUTDOWN_MIN=${IDLE_SHUTDOWN_MIN:-15}
PYTHON=${PYTHON:-python3}     # runs stub_vllm.py
VLLM_PYTHON=${VLLM_PYTHON:-}  # a python with a CPU build of vLLM, which has no working `vllm` command
GRACE_S=${GRACE_S:-10}        # the engine has this long to end after SIGTERM
[[ $ENGINE =~ ^(vllm|stub)$ ]] || { echo "replica.sh: ENGINE=$ENGINE: choose vllm or stub" >&2 && exit 2; }

export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 # without it there is no /v1/load_lora_adapter
export VLLM_SERVER_DEV_MODE=1             # without it there is no /pause, /resume and /server_info
export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=3600  # the proxy keeps connections; the default closes them after 5 idle seconds
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

# The bucket and the scripts are read-only mounts: what is cached goes to local disk.
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}
if ! mkdir -p "$cache" 2>/dev/null || [ ! -w "$cache" ]; then
    cache=$(mktemp -d)
fi
export XDG_CACHE_HOME=$cache HF_HOME=${HF_HOME:-$cache/huggingface} VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$cache/vllm}

if [ "$ENGINE" = stub ]; then
    command=("$PYTHON" "$(dirname "$0")/offline/stub_vllm.py" --model "$MODEL")
elif [ -z "$VLLM_PYTHON" ]; then
    command=(vllm serve "$MODEL" --disable-uvicorn-access-log)
else
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_CPU_OMP_THREADS_BIND=nobind
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export VLLM_ENABLE_V1_MULTIPROCESSING=0 # the worker in the engine's process: apart, it spins on a core of its own
    command=("$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL"
        --disable-uvicorn-access-log --enforce-eager)
fi
# processed_logprobs: of the distribution that was sampled from, so at the temperature, as the trainer computes them.
# generation-config vllm: the model's own sampling defaults stay out.
command+=(--host "$HOST" --port "$PORT" --dtype "$DTYPE" --max-model-len "$MAX_MODEL_LEN"
    --logprobs-mode processed_logprobs --generation-config vllm --enable-prefix-caching
    --enable-lora --max-lora-rank "$MAX_LORA_RANK" --max-loras "$MAX_LORAS" --max-cpu-loras "$MAX_LORAS")

idle_limit_s=$(awk -v min="$IDLE_SHUTDOWN_MIN" 'BEGIN { s = int(min * 60); print s < 1 ? 1 : s }')

# shellcheck disable=SC2329 # the EXIT trap calls it
clean_up() { # end the engine, whatever ends this script
    trap '' TERM INT # once is enough
    kill -TERM "$engine" 2>/dev/null || true
    for ((i = 0; i < GRACE_S * 10; i++)); do
        kill -0 "$engine" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$engine" 2>/dev/null || true
    wait
}
echo "replica.sh: ${command[*]}"
"${command[@]}" &
engine=$!
trap clean_up EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

last='' changed_at=$SECONDS
while kill -0 "$engine" 2>/dev/null; do
    now=$(cat "$HEARTBEATS"/*.heartbeat 2>/dev/null || true)
    if [ -z "$HEARTBEATS" ] || { [ -n "$now" ] && [ "$now" != "$last" ]; }; then
        last=$now changed_at=$SECONDS
    elif ((SECONDS - changed_at >= idle_limit_s)); then
        echo "replica.sh: no heartbeat of a trainer in $HEARTBEATS for $IDLE_SHUTDOWN_MIN minutes: stopping" >&2
        exit 0
    fi
    sleep 1
done
code=0
wait "$engine" || code=$?
echo "replica.sh: the engine ended by itself with code $code" >&2
exit $((code == 0 ? 1 : code)) # vLLM exits 0 when its engine died, but nobody asked it to end
