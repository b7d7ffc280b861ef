#!/usr/bin/env bash
# Serve MiniMax-H3 with a quantization of its own for each component.
#
#   QUANT_CONFIG  JSON by component; default: the DiT in FP8, the text decoder in INT8
#   MODEL_ROOT    folder of the checkpoint (required)
#   PORT          default 8091
#   RUN_DIR       receives server.log; default out/minimax_h3
#   "$@"          further arguments of `vllm serve`
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

default='{"transformer": {"method": "h3_fp8"}, "text_encoder": {"method": "h3_int8"}}'
serve_h3 --diffusion-quantization-config "${QUANT_CONFIG:-$default}" "$@"
