#!/usr/bin/env bash
# Serve MiniMax-H3 from host memory: all blocks stream to the GPU, AdaLN's outputs are computed ahead of a request.
#
#   MODEL_ROOT  folder of the checkpoint (required)
#   PORT        default 8091
#   RUN_DIR     receives server.log; default out/minimax_h3
#   "$@"        further arguments of `vllm serve`
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

config='{"transformer": {"method": "h3_fp8", "adaln": "host"}, "text_encoder": {"method": "h3_fp8"}}'
serve_h3 --diffusion-quantization-config "$config" --enable-layerwise-offload "$@"
