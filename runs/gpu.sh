#!/usr/bin/env bash
# The journey on one GPU: is it fast, does position prediction read at its paper's size, and its paper's table.
#
#     bash runs/gpu.sh                # stopped, it goes on where it was
#     STEPS=60 bash runs/gpu.sh       # a rehearsal: runs of 60 steps, and no table
#
# runs/laptop.sh comes first. No GPU has been at hand so far: only a first run will tell how long these lines take.
set -euo pipefail
cd "$(dirname "$0")/.."
more="--resume ${STEPS:+--steps $STEPS}"

# Packages. Torch's default wheels have no kernels for a V100; for one, this takes the place of torch's line:
#     pip install --force-reinstall 'torch>=2.10,<2.14' --index-url https://download.pytorch.org/whl/cu126
if [ -z "${STEPS:-}" ]; then
    pip install -r requirements.txt
fi

# 1. Does all work here? The first run of the README, which needs no text: the first step compiles, a minute perhaps.
python train.py --pe tupe_r $more

# 2. How fast is a step? All that only a GPU can show goes to a file, line by line: step times beside transformers, each
#    scheme, each objective, the floor that the hardware sets. The command says first what it will do.
if [ -z "${STEPS:-}" ]; then
    python bench.py --gpu out/gpu.json
fi

# 3. The paper's size: 12 layers of 256, 40,000 steps on Wikipedia and books, which are fetched from the hub and made into
#    tokens first (hours, once). Each log line says how many ms a step takes and when it is below a baseline.
python train.py --pe tupe_r --objective pplm --preset paper $more
python train.py --pe tupe_r --objective mlm+pplm --pos_rate .15 --preset paper $more

# 4. What it has learned, seconds.
python probe.py --ckpt out/wikibooks-paper-tupe_r-mlm+pplm-s1337
python finetune.py --task rte --ckpt out/wikibooks-paper-tupe_r-mlm+pplm-s1337 --seeds 5

# 5. The paper's table, days: it says first how many hours of a V100 each row takes. Stopped, it goes on.
if [ -z "${STEPS:-}" ]; then
    python results/run.py p0-table-1
fi
