#!/usr/bin/env bash
# The whole journey on a laptop, an hour or two on two CPU cores; nothing is downloaded but packages.
#
#     bash runs/laptop.sh             # stopped, it goes on where it was
#     STEPS=60 bash runs/laptop.sh    # a rehearsal of some minutes, best in a copy of its own: runs of 60 steps, which learn nothing
#
# Each line is a command of the README; `--resume` and STEPS are all that is added.
set -euo pipefail
cd "$(dirname "$0")/.."
more="--resume ${STEPS:+--steps $STEPS}"
tune="${STEPS:+--limit_train 64 --epochs 1}"
first=out/docs-demo-tupe_r-mlm-s1337
reading=out/docs-demo-tupe_r-mlm+pplm-s1337

# Packages: the first line is what the programs need, the second is for pictures and for a bag of words.
if [ -z "${STEPS:-}" ]; then
    pip install -r requirements.txt
    pip install matplotlib scikit-learn
fi

# 1. A first run, 2 to 4 minutes (and half a minute, once, to prepare its text): guess the hidden words. It ends far below what
#    somebody loses who knows only how frequent words are.
python train.py --pe tupe_r $more

# 2. The same with BERT's positions, 2 to 4 minutes: after as many steps it has hardly begun.
python train.py --pe abs $more

# 3. Guess hidden words and say where shuffled words stood, 10 to 20 minutes.
python train.py --pe tupe_r --objective mlm+pplm --pos_rate .15 --n_head 16 --steps 3000 $more

# 4. Try both, seconds.
python sample.py --ckpt $first --text 'the number of [MASK] in the array'
python sample.py --ckpt $reading --text 'It is not possible to use both of these options at the same time.'

# 5. What do they do with positions, and do they read? Seconds each: numbers, and pictures in the run's folder. The last one
#    draws schemes at their start, without a run.
python probe.py --ckpt $first
python probe.py --ckpt $reading
python probe.py --pe t5,rope,alibi

# 6. A task, some minutes each: which library is a docstring from? A trained model, the same model untrained, a bag of words.
python finetune.py --task docs --ckpt $first $tune
python finetune.py --task docs --ckpt scratch $tune
python finetune.py --task docs --ckpt bow ${STEPS:+--limit_train 64}

# 7. A page that runs the models in a browser, seconds: open out/page.html.
python page.py $reading out/docs-demo-abs-mlm-s1337 out/page.html

# 8. Twelve schemes, half an hour to an hour: loss, when each begins to learn, and a map of each, beside the figures of this project.
python results/run.py first ${STEPS:+--steps $STEPS}

# 9. Now you: this lists what to write yourself.
python exercises.py
