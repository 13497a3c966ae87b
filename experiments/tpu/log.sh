#!/usr/bin/env bash
#
# Shows the end of a worker's log and follows it until Ctrl-C, which does not stop the run.
#
#     experiments/tpu/log.sh [WORKER]
#
# WORKER is 0 unless given: the one that prints the progress of the run.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
which=${1:-0}
[[ $# -le 1 && $which =~ ^[0-9]+$ ]] || refuse "'$*' is not the number of one worker: give 0, 1, ..."
read_settings

worker "$which" log
