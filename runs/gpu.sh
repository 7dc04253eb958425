#!/usr/bin/env bash
# Everything on one GPU: does it compute the same as a CPU, how fast is it, and RPP's objective at RPP's size. Run runs/laptop.sh first.
#
#     bash runs/gpu.sh                # after an interruption, the same command resumes
#     STEPS=60 bash runs/gpu.sh       # a test of this script: runs of 60 steps, and no table
#
# This has not been run on a GPU yet, so no times are given.
set -euo pipefail
cd "$(dirname "$0")/.."
more="--resume ${STEPS:+--steps $STEPS}"
pairs="${STEPS:+--pairs 2}"
mkdir -p out/gpu

# Packages. Torch's default wheels have no kernels for a V100; for one, replace torch with
#     pip install --force-reinstall 'torch>=2.10,<2.14' --index-url https://download.pytorch.org/whl/cu126
if [ -z "${STEPS:-}" ]; then
    pip install -r requirements.txt -r requirements-dev.txt
fi

# 1. The demo, which needs no text. The first step compiles, perhaps for a minute.
python train.py --pe tupe_r $more

# 2. Losses and gradients of every scheme and objective, beside a CPU's in float32; then compiled.
for dtype in float32 float16 bfloat16; do
    python -m tools.bench --agree --pe all --dtype $dtype --json out/gpu/agree-pe-$dtype.json
    python -m tools.bench --agree --pe tupe_r --objective all --dtype $dtype --json out/gpu/agree-objective-$dtype.json
done
for pe in $(python -c "from model import PE_NAMES; print(*PE_NAMES)"); do
    python -m tools.bench --agree --compile --pe "$pe" --json "out/gpu/agree-compiled-$pe.json"
done

# 3. Speed and memory of a step: beside transformers, of schemes, of objectives.
for preset in rpp tupe; do
    python -m tools.bench --peer hf --preset $preset $pairs --json out/gpu/peer-$preset.json
done
python -m tools.bench --compile --preset rpp --pe tupe_r,tupe_a,rel,t5,rope $pairs --json out/gpu/pe.json
python -m tools.bench --compile --preset rpp --objective pplm,taco,mlm_full,clm $pairs --json out/gpu/objective.json

# 4. fp16 with a gradient scaler, as on a V100.
python train.py --pe tupe_r --objective pplm --preset rpp --dataset docs --tokenizer bpe --dtype float16 --steps 50 --resume \
    --out_dir out/gpu/fp16

# 5. RPP's size: 12 layers of width 256, 40,000 steps on Wikipedia and books, which are downloaded from the hub and tokenized first
#    (hours, once).
python train.py --pe tupe_r --objective pplm --preset rpp $more
python train.py --pe tupe_r --objective mlm+pplm --pos_rate .15 --preset rpp $more

# 6. What the second run has learned, seconds to minutes.
python -m tools.probe --ckpt out/wikibooks-rpp-tupe_r-mlm+pplm-s1337
python finetune.py --task rte --ckpt out/wikibooks-rpp-tupe_r-mlm+pplm-s1337 --seeds 5

# 7. RPP's table 1, days: see results/README.md.
if [ -z "${STEPS:-}" ]; then
    python -m results.run rpp-table-1
fi
