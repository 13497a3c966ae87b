#!/usr/bin/env bash
#
# Puts this repository, as it was last committed, on every worker, with all it needs to run.
#
#     experiments/tpu/install.sh
#
# It lies in ~/demyrl there, its Python in ~/demyrl-env. TPU_SETUP, if set, is run afterwards.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -eq 0 ]] || refuse "'$1' is not expected: everything is in settings.sh."
read_settings

if [[ -n $(git -C "$repository" status --porcelain) ]]; then
  note "WARNING: changes that are not committed are not installed"
fi
archive=$(mktemp -d)/demyrl.tar.gz
trap 'rm -rf "$(dirname "$archive")"' EXIT
git -C "$repository" archive --format=tar.gz --output="$archive" HEAD

note "copying $(git -C "$repository" rev-parse --short HEAD) to the workers of $TPU_NAME"
gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:demyrl.tar.gz" "${place[@]}" \
  ${reach[@]+"${reach[@]}"} --worker=all
on_workers all bash -c "mkdir -p demyrl && tar -xzf demyrl.tar.gz -C demyrl"
worker all install "$TPU_PYTHON" "$TPU_EXTRAS" "$TPU_SETUP"
note "installed on all workers of $TPU_NAME"
