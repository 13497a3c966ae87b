#!/usr/bin/env bash
#
# Copies a folder between the workers, the bucket and this machine; only what differs is sent.
#
#     experiments/tpu/sync.sh up FOLDER       worker 0 -> bucket
#     experiments/tpu/sync.sh down FOLDER     bucket -> all workers
#     experiments/tpu/sync.sh push FOLDER     this machine -> bucket
#     experiments/tpu/sync.sh fetch FOLDER    bucket -> this machine, without checkpoints
#
# FOLDER is a relative path, such as runs/x: on the workers in ~/demyrl, in the bucket under
# TPU_BUCKET, here in the present folder. A run whose --workdir is in the bucket needs only fetch.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -eq 2 ]] || refuse "expected two words, a direction and a folder, got $# (--help says more)."
direction=$1 folder=$2
[[ -n $folder && $folder != /* && $folder != gs://* ]] ||
  refuse "the folder is '$folder': give a relative path, such as runs/x."
read_settings
need TPU_BUCKET "a place in a bucket, gs://BUCKET/FOLDER"
[[ $TPU_BUCKET == gs://?* ]] || refuse "TPU_BUCKET is '$TPU_BUCKET': write gs://BUCKET/FOLDER."
kept=${TPU_BUCKET%/}/$folder

case $direction in
  up) worker 0 copy "$folder" "$kept" ;;
  down) worker all copy "$kept" "$folder" ;;
  push)
    [[ -d $folder ]] || refuse "there is no folder '$folder' here to push."
    gcloud storage rsync --recursive "$folder" "$kept"
    ;;
  fetch)
    mkdir -p "$folder"
    gcloud storage rsync --recursive --exclude='(.*/)?checkpoints/.*' "$kept" "$folder"
    ;;
  *) refuse "'$direction' is no direction: use up, down, push or fetch." ;;
esac
