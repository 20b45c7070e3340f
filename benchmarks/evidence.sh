#!/usr/bin/env bash
# The evidence of docs/results.md, a time slice at a time: what has finished when the time is up is kept, and a later
# call goes on, on another machine too.
#
#   benchmarks/evidence.sh SECONDS STEP... [--setting=NAME] [--method=NAME] [KEY=VALUE...]
#
# STEP is `search`, or a packaged suite without its `evidence_` (frozen, pairs, ...). KEY=VALUE is set in all runs;
# --setting, --method and --mixture choose some of them, as for `gar sweep`.
#
#   DATA  the tasks for --data-dir (default: data)
#   KEPT  what earlier calls brought back (default: docs/results)
#   OUT   where this call leaves evidence*.csv* and search.tar.gz (default: evidence)
#   WORK  run directories, which need not outlive the machine (default: a temporary directory)
#   GAR   the command (default: gar); JOBS runs at a time of a sweep (default: what fills the GPUs)
#   UPDATES  of the search's candidates (default: the protocol's), to try it out
set -u -o pipefail
seconds=$1; shift
steps=() overrides=() only=()
for word in "$@"; do
    case $word in --*=*) only+=("$word") ;; *=*) overrides+=("$word") ;; *) steps+=("$word") ;; esac
done
DATA=${DATA:-data} KEPT=${KEPT:-docs/results} OUT=${OUT:-evidence} GAR=${GAR:-gar}
WORK=${WORK:-$(mktemp -d)}
end=$((SECONDS + seconds - 15))      # the last seconds are for the archive
jobs=(${JOBS:+--jobs "$JOBS"})
mkdir -p "$OUT" "$WORK/search"

for path in "$KEPT"/evidence*.csv* "$KEPT/search.tar.gz"; do
    if [ ! -e "$OUT/${path##*/}" ] && [ -e "$path" ]; then cp "$path" "$OUT/"; fi
done
if [ -e "$OUT/search.tar.gz" ]; then tar -xzf "$OUT/search.tar.gz" -C "$WORK/search"; fi

archive() {      # candidates too, so that the search goes on; histories are not needed for that
    tar -czf "$WORK/search.tar.gz" -C "$WORK/search" --exclude=history.jsonl --exclude=diagnostics.json \
        --exclude=environment.json --exclude=checkpoints --exclude=log.txt --exclude=.sweep --exclude='*.lock' . &&
        mv "$WORK/search.tar.gz" "$OUT/search.tar.gz"
}

limited() {      # a command, interrupted when the time is up: it then stops after a checkpoint
    local left=$((end - SECONDS))
    if [ "$left" -lt 5 ]; then return 130; fi
    timeout --signal=INT --kill-after=10 "$left" "$@"
}

search() {       # settings and methods run side by side; what is already measured is not run again
    local options=(${UPDATES:+--updates "$UPDATES"})
    limited $GAR search evidence_frozen --mixture six_complete --out "$WORK/search" --data-dir "$DATA" \
        "${jobs[@]}" "${options[@]}" "${only[@]}" "${overrides[@]}" >"$WORK/search.log" 2>&1
    local code=$?
    tail -n 3 "$WORK/search.log"
    archive
    return $code
}

chosen() {       # all choices in one folder, as `--chosen` wants them
    mkdir -p "$WORK/chosen"
    if [ -d "$KEPT/chosen" ]; then cp -r "$KEPT/chosen/." "$WORK/chosen/"; fi
    (cd "$WORK/search" && find . -name chosen.yaml) | while read -r path; do
        mkdir -p "$WORK/chosen/$(dirname "$path")" && cp "$WORK/search/$path" "$WORK/chosen/$path"
    done
}

for step in "${steps[@]}"; do
    echo "== $step: $((end - SECONDS)) s left"
    store=$OUT/evidence.csv
    if [ "$step" = pairs ]; then store=$OUT/evidence_pairs.csv.gz; fi      # by far the most runs
    case $step in
    search) search ;;
    table|trained*|top4|roberta|deberta)   # a search there is out of reach: one learning rate for all methods
        limited $GAR sweep "evidence_$step" --out "$WORK/runs" --store "$store" --no-models \
            --data-dir "$DATA" "${jobs[@]}" "${only[@]}" "${overrides[@]}" 2>&1 | tail -n 4 ;;
    *)
        chosen
        limited $GAR sweep "evidence_$step" --chosen "$WORK/chosen" --out "$WORK/runs" \
            --store "$store" --no-models --data-dir "$DATA" \
            "${jobs[@]}" "${only[@]}" "${overrides[@]}" 2>&1 | tail -n 4 ;;
    esac
done
ls -l "$OUT"
