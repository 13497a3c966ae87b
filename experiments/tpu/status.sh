#!/usr/bin/env bash
#
# Prints the state of the machine, and what the command on each worker does.
#
#     experiments/tpu/status.sh
#
# A worker says running, done, failed CODE, lost (it was killed) or none.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -eq 0 ]] || refuse "'$1' is not expected: everything is in settings.sh."
read_settings

now=$(state)
echo "$TPU_NAME is $now"
if [[ $now == READY ]]; then worker all status; fi
