#!/usr/bin/env bash
# Serve MiniMax-H3 with every linear of the DiT and the text decoder in FP8.
#
#   MODEL_ROOT  folder of the checkpoint (required)
#   PORT        default 8091
#   RUN_DIR     receives server.log; default out/minimax_h3
#   "$@"        further arguments of `vllm serve`
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

serve_h3 --quantization h3_fp8 "$@"
