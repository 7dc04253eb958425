#!/usr/bin/env bash
# Everything on a laptop: an hour or two on two CPU cores. Nothing is downloaded except packages.
#
#     bash runs/laptop.sh             # after an interruption, the same command resumes
#     STEPS=60 bash runs/laptop.sh    # a test of this script in some minutes: runs of 60 steps, which learn nothing; then delete out/
set -euo pipefail
cd "$(dirname "$0")/.."
more="--resume ${STEPS:+--steps $STEPS}"
tune="${STEPS:+--limit_train 64 --epochs 1}"
mlm=out/docs-demo-tupe_r-mlm-s1337
pplm=out/docs-pairs-tupe_r-pplm-s1337
both=out/docs-demo-tupe_r-mlm+pplm-s1337

# Packages. The second line is for figures and the bag of words.
if [ -z "${STEPS:-}" ]; then
    pip install -r requirements.txt
    pip install matplotlib scikit-learn
fi

# 1. Masked language modeling, 3 to 20 minutes (and half a minute, once, to prepare the text). The loss ends far below that of
#    token frequencies.
python train.py --pe tupe_r $more

# 2. The same with BERT's positions, 3 to 20 minutes: after as many steps it has hardly started.
python train.py --pe abs $more

# 3. Position prediction on sequences of 16 tokens, 4 to 20 minutes; then together with masked language modeling, 15 to 45 minutes.
python train.py --pe tupe_r --objective pplm $more
python train.py --pe tupe_r --objective mlm+pplm --preset demo --pos_rate .15 --n_head 16 --steps 3000 $more

# 4. Try all three, seconds.
python -m tools.sample --ckpt $mlm --text 'the number of [MASK] in the array'
python -m tools.sample --ckpt $pplm --text 'Raises an error if the file does not exist.'
python -m tools.sample --ckpt $both --text 'It is not possible to use both of these options at the same time.'

# 5. How do they use positions, and do they use the tokens? Seconds each. The last one draws schemes before training.
python -m tools.probe --ckpt $mlm
python -m tools.probe --ckpt $pplm
python -m tools.probe --ckpt $both
python -m tools.probe --pe t5,rope,alibi

# 6. A task, some minutes each: which library is a docstring from? A trained model, the same model untrained, a bag of words.
python finetune.py --task docs --ckpt $both $tune
python finetune.py --task docs --ckpt scratch $tune
python -m tools.bow --task docs ${STEPS:+--limit_train 64}

# 7. A page that runs the models in a browser, seconds: open out/page.html.
python -m tools.page $both out/docs-demo-abs-mlm-s1337 out/page.html

# 8. Twelve schemes, half an hour to an hour: loss, plateau and attention map of each, beside our figures.
python -m results.run first ${STEPS:+--steps $STEPS}

# 9. The exercises.
python -m teach.exercises
