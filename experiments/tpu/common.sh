# shellcheck shell=bash
# What the scripts of this folder share: settings, words, and the calls to gcloud. Sourced, not run.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck disable=SC2034 # install.sh uses it
repository=$(cd "$here/../.." && pwd)

# The comment at the top of the script that is run.
usage() {
  sed -n '3,/^$/s/^# \{0,1\}//p' "$0"
}

note() {
  echo "$(date +%H:%M:%S) $*" >&2
}

# Misuse: ends the script with 2.
refuse() {
  echo "${0##*/}: $*" >&2
  exit 2
}

# What was asked for did not work: ends the script with 1.
give_up() {
  echo "${0##*/}: $*" >&2
  exit 1
}

help_if_asked() {
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    usage
    exit 0
  fi
}

read_settings() {
  settings=${TPU_SETTINGS:-$here/settings.sh}
  [[ -r $settings ]] || refuse "TPU_SETTINGS is '$settings', and there is no such file to read."
  # shellcheck source=settings.sh
  source "$settings"
  need TPU_PROJECT "the id of your Google Cloud project"
  need TPU_ZONE "a zone where the project has quota for TPUs, such as us-west4-a"
  need TPU_NAME "a name for the machine"
  need TPU_TYPE "an accelerator type, such as v5litepod-16"
  need TPU_RUNTIME "the runtime version that fits TPU_TYPE, such as v2-alpha-tpuv5-lite"
  one_of TPU_REQUEST queued direct
  one_of TPU_CAPACITY spot on-demand reserved
  one_of TPU_ADDRESSES external internal
  place=(--project="$TPU_PROJECT" --zone="$TPU_ZONE")
  reach=()
  if [[ $TPU_ADDRESSES == internal ]]; then reach=(--internal-ip); fi
  command -v gcloud >/dev/null ||
    refuse "gcloud is not installed: see https://cloud.google.com/sdk/docs/install."
}

# need VARIABLE MEANING
need() {
  [[ -n ${!1:-} ]] || refuse "$1 is not set: it is $2. Set it in $settings or the environment."
}

# one_of VARIABLE VALUE...
one_of() {
  local variable=$1 value
  shift
  for value in "$@"; do
    if [[ ${!variable} == "$value" ]]; then return; fi
  done
  refuse "$variable is '${!variable}': use one of $*."
}

# described KIND FIELD: the state of a request or a machine as Google names it; MISSING where there
# is none, UNREACHABLE where Google could not be asked.
described() {
  local answer errors
  errors=$(mktemp)
  if answer=$(gcloud compute tpus "$1" describe "$TPU_NAME" "${place[@]}" \
    --format="value($2)" 2>"$errors"); then
    echo "${answer:-UNKNOWN}"
  elif grep -q NOT_FOUND "$errors"; then
    echo MISSING
  else
    cat "$errors" >&2
    echo UNREACHABLE
  fi
  rm -f "$errors"
}

# The state of the machine, or of the request for it as long as that is not filled.
state() {
  local request
  if [[ $TPU_REQUEST == queued ]]; then
    request=$(described queued-resources state.state)
    if [[ $request != ACTIVE ]]; then
      echo "$request"
      return
    fi
  fi
  described tpu-vm state
}

# on_workers WHICH WORD...: runs a command, given as words, on the workers all, 0, 1, ...
on_workers() {
  local which=$1 words
  shift
  words=$(printf '%q ' "$@")
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${place[@]}" ${reach[@]+"${reach[@]}"} \
    --worker="$which" --command="${words% }"
}

# on_workers WHICH WORD..., for what worker.sh does there.
worker() {
  local which=$1
  shift
  on_workers "$which" bash demyrl/experiments/tpu/worker.sh "$@"
}
