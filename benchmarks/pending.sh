#!/usr/bin/env bash
# Commands whose figures or verdicts are "not measured": run them where the GPUs are, write what they print where it is
# named, and take them out of here.
#
#     bash benchmarks/pending.sh MODEL OUT    # MODEL: python benchmarks/synthetic_h3.py MODEL --layers 50
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?the root of a MiniMax-H3, 62 GiB} out=${2:?a folder for figures, 31 GiB free}
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -gt 0 ] || { echo "pending.sh: needs a CUDA device, found none" >&2; exit 1; }
mkdir -p "$out"

# docs/hardware.md: the table of what was run.
python3 -m pytest tests/gpu tests/attention tests/kernels tests/methods tests/blocks tests/dlo

# docs/checkpoints.md, "Loading": the export's row, with its scales read as slices.
vllm-h3-quant export "$model" "$out/export" --method h3_fp8
python3 benchmarks/bench_load.py --model "$model" --export "$out/export" --variants export --repeats 2 --out "$out"

if [ "$gpus" -ge 2 ]; then
    # docs/hardware.md: with the VAEs' pages shared between ranks.
    python3 -m pytest tests/dlo/test_ranks.py
    # docs/memory.md: two ranks on one host, with the same.
    python3 benchmarks/bench_offload.py --model "$model" --out "$out" --ulysses 2 \
        --variants h3_fp8,h3_fp8@dlo,h3_fp8+keep,h3_fp8+host@dlo
fi
