#!/usr/bin/env bash
#
# Makes the TPU machine that settings.sh describes, and returns when it is ready.
#
#     experiments/tpu/create.sh
#
# With TPU_REQUEST=queued the request waits in Google's queue, for hours if need be; Ctrl-C leaves it
# there, and watch.sh takes it up. It costs from the moment it is ready until delete.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -eq 0 ]] || refuse "'$1' is not expected: everything is in settings.sh."
read_settings

options=(--accelerator-type="$TPU_TYPE")
if [[ $TPU_CAPACITY != on-demand ]]; then options+=("--$TPU_CAPACITY"); fi
if [[ $TPU_ADDRESSES == internal ]]; then options+=(--internal-ips); fi
if [[ -n $TPU_SERVICE_ACCOUNT ]]; then options+=(--service-account="$TPU_SERVICE_ACCOUNT"); fi

note "asking for $TPU_TYPE ($TPU_CAPACITY) in $TPU_ZONE as $TPU_NAME"
if [[ $TPU_REQUEST == queued ]]; then
  ask=(queued-resources create "$TPU_NAME" --node-id="$TPU_NAME" --runtime-version="$TPU_RUNTIME")
else
  ask=(tpu-vm create "$TPU_NAME" --version="$TPU_RUNTIME")
fi
gcloud compute tpus "${ask[@]}" "${place[@]}" "${options[@]}" ||
  give_up "Google did not take the request for $TPU_NAME: the reason stands above."

while true; do
  now=$(state)
  case $now in
    READY)
      note "$TPU_NAME is ready"
      exit 0
      ;;
    FAILED | SUSPENDING | SUSPENDED | PREEMPTED | TERMINATED | STOPPED | MISSING)
      give_up "$TPU_NAME is $now and will not become ready: run delete.sh, then create.sh again."
      ;;
  esac
  note "$TPU_NAME is $now"
  sleep "$TPU_POLL_S"
done
