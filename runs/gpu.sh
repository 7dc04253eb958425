#!/usr/bin/env bash
# Everything on one GPU: does it compute the same as a CPU, how fast is it, and RPP's objective at RPP's size. Run runs/laptop.sh first.
#
#     bash runs/gpu.sh                # after an interruption, the same command resumes
#     STEPS=60 bash runs/gpu.sh       # a test of this script: runs of 60 steps on docs, and no downloads
#
# This has not been run on a GPU yet, so no times are given.
set -euo pipefail
cd "$(dirname "$0")/.."
more="--resume ${STEPS:+--steps $STEPS}"
pairs="${STEPS:+--pairs 2}"
text="${STEPS:+--dataset docs --tokenizer bpe}"
out=out/gpu${STEPS:+-test}
mkdir -p $out

# Packages. Torch's default wheels have no kernels for a V100; for one, replace torch with
#     pip install --force-reinstall 'torch>=2.10,<2.14' --index-url https://download.pytorch.org/whl/cu126
if [ -z "${STEPS:-}" ]; then
    pip install -r requirements.txt -r requirements-dev.txt
fi

# 1. The demo, which needs no text. The first step compiles, perhaps for a minute.
python train.py --pe tupe_r $more --out_dir $out/demo

# 2. Losses and gradients of every scheme and objective, beside a CPU's in float32; then compiled, some of them at RPP's size as well, since
#    the compiler uses other kernels for large tensors.
bf16=$(python -c "import torch; print('bfloat16' if torch.cuda.is_bf16_supported(including_emulation=False) else '')")
for dtype in float32 float16 $bf16; do
    python -m tools.bench --agree --pe all --dtype $dtype --json $out/agree-pe-$dtype.json
    python -m tools.bench --agree --pe tupe_r --objective all --dtype $dtype --json $out/agree-objective-$dtype.json
done
python -m tools.bench --agree --compile --pe all --json $out/agree-compiled.json
python -m tools.bench --agree --compile --preset rpp --pe tupe_r,rel,deberta --objective mlm,pplm,taco --json $out/agree-rpp.json

# 3. Speed and memory of a step: beside transformers, of schemes, of objectives.
python -m tools.bench --peer hf --preset rpp $pairs --json $out/peer-rpp.json
python -m tools.bench --peer hf --preset tupe --batch_size 8 $pairs --json $out/peer-tupe.json    # 32 need more than 16 GB
python -m tools.bench --compile --preset rpp --pe tupe_r,tupe_a,rel,t5,rope $pairs --json $out/pe.json
python -m tools.bench --compile --preset rpp --objective pplm,taco,mlm_full,clm $pairs --json $out/objective.json

# 4. fp16 with a gradient scaler, as on a V100.
python train.py --pe tupe_r --objective pplm --preset rpp --dataset docs --tokenizer bpe --dtype float16 --steps 50 --resume \
    --out_dir $out/fp16

# 5. RPP's size: 12 layers of width 256, 40,000 steps on Wikipedia and books, which are downloaded from the hub and tokenized first
#    (hours, once).
python train.py --pe tupe_r --objective pplm --preset rpp $text $more --out_dir $out/pplm
python train.py --pe tupe_r --objective mlm+pplm --pos_rate .15 --preset rpp $text $more --out_dir $out/both

# 6. What the second run has learned, seconds to minutes.
python -m tools.probe --ckpt $out/both

# 7. Fine-tuning on RTE; then RPP's table 1, days: see results/README.md.
if [ -z "${STEPS:-}" ]; then
    python finetune.py --task rte --ckpt $out/both --seeds 5
    python -m results.run rpp-table-1
fi
