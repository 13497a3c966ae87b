#!/usr/bin/env bash
#
# Ends what run.sh started, on every worker. The machine stays, and goes on to cost: see delete.sh.
#
#     experiments/tpu/stop.sh

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -eq 0 ]] || refuse "'$1' is not expected: everything is in settings.sh."
read_settings

worker all stop
