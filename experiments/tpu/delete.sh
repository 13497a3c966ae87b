#!/usr/bin/env bash
#
# Deletes the machine and the request for it, with all that is on its disks. It then costs no more.
#
#     experiments/tpu/delete.sh
#
# What lies in a bucket stays, and costs until it is removed there.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -eq 0 ]] || refuse "'$1' is not expected: everything is in settings.sh."
read_settings

if [[ $TPU_REQUEST == queued ]]; then
  now=$(described queued-resources state.state)
  remove=(queued-resources delete "$TPU_NAME" --force)
else
  now=$(described tpu-vm state)
  remove=(tpu-vm delete "$TPU_NAME")
fi
if [[ $now == MISSING ]]; then
  note "there is no $TPU_NAME to delete"
  exit 0
fi
note "deleting $TPU_NAME, which is $now"
gcloud compute tpus "${remove[@]}" "${place[@]}" --quiet ||
  give_up "$TPU_NAME was not deleted and may go on to cost: the reason stands above."
note "$TPU_NAME is deleted"
