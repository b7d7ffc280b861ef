# shellcheck shell=bash
# Sourced by the scripts beside it.

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 1
}

# Replace this shell by a server of MODEL_ROOT; arguments go to `vllm serve`, the last of a repeated one counts.
serve_h3() {
    [[ -n ${MODEL_ROOT:-} ]] || fail "MODEL_ROOT is not set; give the folder of a MiniMax-H3 checkpoint"
    [[ -f $MODEL_ROOT/model_index.json ]] ||
        fail "MODEL_ROOT=$MODEL_ROOT has no model_index.json; give the folder that holds FL2VA/"
    local run_dir=${RUN_DIR:-out/minimax_h3}
    mkdir -p "$run_dir"
    exec > >(tee "$run_dir/server.log") 2>&1
    # Without a task type the engine loads both DiTs of the checkpoint.
    exec vllm serve "$MODEL_ROOT" --omni --trust-remote-code --port "${PORT:-8091}" --task-type t2va "$@"
}
