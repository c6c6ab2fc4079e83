#!/usr/bin/env bash
# From nothing to a report on SmolLM2-135M: oracle, distillation, evaluation. `make quickstart` runs it,
# docs/quickstart-sparse.md describes it. Every variable can be set from outside: STEPS=100 bash examples/quickstart.sh.
# An interrupted run resumes; finished parts are not repeated.
set -euo pipefail
examples=$(cd "$(dirname "$0")" && pwd)

OUTPUT=${OUTPUT:-quickstart}      # the folder of all results
BOOKS=${BOOKS:-$OUTPUT/books}     # has a folder `train`, and a folder `test` of books that are not trained on
MODEL=${MODEL:-}                  # SmolLM2-135M if empty

LENGTHS=${LENGTHS:-2048}          # of contexts, in tokens; several with spaces between them, here and below
QUERY_BLOCKS=${QUERY_BLOCKS:-1 64}  # queries that share their top-k
ORACLE_BUDGETS=${ORACLE_BUDGETS:-64 128 256 512}
ORACLE_CONTEXTS=${ORACLE_CONTEXTS:-4}
ORACLE_SEGMENTS=${ORACLE_SEGMENTS:-2}
BUDGETS=${BUDGETS:-256 512}       # selected keys
CONTEXTS=${CONTEXTS:-12}          # needles
SEGMENTS=${SEGMENTS:-4}           # passages for perplexity
LAYER_SEGMENTS=${LAYER_SEGMENTS:-2}  # passages on which recall and mass of every layer are measured

LENGTH=${LENGTH:-2048}            # of training sequences
STEPS=${STEPS:-300}
HEADS=${HEADS:-4}
INIT=${INIT:-plain}
LR=${LR:-3e-3}
NEEDLES=${NEEDLES:-0.5}
ANSWER_WEIGHT=${ANSWER_WEIGHT:-8}
SAVE_EVERY=${SAVE_EVERY:-100}
MORE=${MORE:-}                    # other flags of `streamkl distill`, such as --temperature

refuse() {
    printf '%s\n' "$1" "With texts of your own: BOOKS=folder make quickstart, where the folder has .txt or .jsonl files in train/ and in test/." >&2
    exit 1
}

take_novels() {
    command -v apt-get >/dev/null || refuse "The novels come in a Debian package, and there is no apt-get here."
    made=$BOOKS.making  # renamed when it is complete
    rm -rf "$made"
    mkdir -p "$made/train" "$made/test"
    (cd "$made" && apt-get download r-cran-janeaustenr) || refuse "apt-get does not find the novels: \`apt-get update\` may help."
    python "$examples/austen.py" "$made"/r-cran-janeaustenr_*.deb "$made"
    mv "$made"/{emma,mansfield-park,pride-and-prejudice,sense-and-sensibility}.txt "$made/train"
    mv "$made"/{persuasion,northanger-abbey}.txt "$made/test"
    rm "$made"/*.deb
    mv "$made" "$BOOKS"
}

[ -e "$BOOKS" ] || take_novels
for part in train test; do
    [ -d "$BOOKS/$part" ] || refuse "$BOOKS has no folder $part."
done
[ -n "$MODEL" ] || MODEL=$(python -c "from streamkl.testing import smollm2; print(smollm2.checkpoint())")

# Variables with several numbers or flags are split into words on purpose.
# shellcheck disable=SC2086
{
    echo "== how sparse can it be"
    streamkl oracle "$MODEL" --text "$BOOKS/test" --lengths $LENGTHS --budgets $ORACLE_BUDGETS --query-blocks $QUERY_BLOCKS \
        --selectors oracle window --contexts "$ORACLE_CONTEXTS" --segments "$ORACLE_SEGMENTS" \
        --layer-segments "$LAYER_SEGMENTS" --output "$OUTPUT/oracle"

    echo "== training indexers"
    if [ -e "$OUTPUT/run/indexers" ]; then
        echo "$OUTPUT/run/indexers exists; other settings need another OUTPUT"
    else  # without a checkpoint --resume starts at the first step
        streamkl distill --model "$MODEL" --text "$BOOKS/train" --output "$OUTPUT/run" --length "$LENGTH" --steps "$STEPS" \
            --heads "$HEADS" --init "$INIT" --lr "$LR" --needles "$NEEDLES" --answer-weight "$ANSWER_WEIGHT" \
            --save-every "$SAVE_EVERY" --resume $MORE
    fi

    echo "== what they cost and gain"
    streamkl evaluate "$MODEL" --indexers "$OUTPUT/run/indexers" --text "$BOOKS/test" --lengths $LENGTHS \
        --budgets $BUDGETS --query-blocks $QUERY_BLOCKS --contexts "$CONTEXTS" --segments "$SEGMENTS" \
        --layer-segments "$LAYER_SEGMENTS" --output "$OUTPUT/report"
}
