#!/usr/bin/env bash
#
# Starts a command of demyrl on every worker; it goes on when the connection ends.
#
#     experiments/tpu/run.sh MODULE [ARGUMENT...]
#     experiments/tpu/run.sh demyrl.train --config=configs/grpo_tcr.py:qwen3_4b \
#         --workdir=gs://BUCKET/runs/x
#
# Paths on the workers are relative to ~/demyrl. All workers run the same command, with
# DEMYRL_PROCESSES=auto, by which they find each other. log.sh follows it, stop.sh ends it.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -gt 0 && $1 != -* ]] || refuse "no module: name one, such as demyrl.train (--help says more)."
read_settings

worker all start "$@"
note "started on all workers of $TPU_NAME: $*"
