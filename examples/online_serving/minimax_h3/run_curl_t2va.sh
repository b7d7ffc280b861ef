#!/usr/bin/env bash
# Request one clip with sound from a running server, save it and check it.
#
#   BASE_URL      default http://127.0.0.1:8091
#   RUN_DIR       receives t2va.mp4 and validation.txt; default out/minimax_h3
#   PROMPT        what to show
#   WIDTH HEIGHT ASPECT_RATIO NUM_FRAMES FPS STEPS SEED
#                 defaults 1344 768 16:9 124 24 50 7
#   WAIT_S        seconds to wait for a healthy server; default 1800
#   REQUEST_S     seconds to wait for the clip; default 3600
#   PYTHON        interpreter with vllm_h3_quant; default python3
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

base_url=${BASE_URL:-http://127.0.0.1:8091}
run_dir=${RUN_DIR:-out/minimax_h3}
prompt=${PROMPT:-A street musician plays the accordion while pigeons land around her.}
width=${WIDTH:-1344}
height=${HEIGHT:-768}
frames=${NUM_FRAMES:-124}
fps=${FPS:-24}
clip=$run_dir/t2va.mp4

mkdir -p "$run_dir"
rm -f "$clip" "$run_dir/validation.txt"

deadline=$((SECONDS + ${WAIT_S:-1800}))
until curl --silent --fail --max-time 5 --output /dev/null "$base_url/health"; do
    ((SECONDS < deadline)) || fail "$base_url is not healthy after ${WAIT_S:-1800} s"
    sleep 1
done

# --form-string: a prompt may begin with @ or <, which --form would read as a file name.
status=$(curl --silent --show-error --max-time "${REQUEST_S:-3600}" --output "$clip" --write-out '%{http_code}' \
    --form-string "prompt=$prompt" \
    --form-string "width=$width" \
    --form-string "height=$height" \
    --form-string "aspect_ratio=${ASPECT_RATIO:-16:9}" \
    --form-string "num_frames=$frames" \
    --form-string "fps=$fps" \
    --form-string "num_inference_steps=${STEPS:-50}" \
    --form-string "seed=${SEED:-7}" \
    "$base_url/v1/videos/sync")
if [[ $status != 200 ]]; then
    answer=$(head -c 500 "$clip")
    rm -f "$clip"
    fail "$base_url answered $status: $answer"
fi

"${PYTHON:-python3}" -m vllm_h3_quant.fidelity.validate_clip "$clip" \
    --frames "$frames" --fps "$fps" --width "$width" --height "$height" | tee "$run_dir/validation.txt"
