#!/usr/bin/env bash
#
# Keeps a command running until it is done: makes the machine, installs, starts, and does all of it
# again when the machine is taken away. Leave it running where it is not interrupted (tmux).
#
#     experiments/tpu/watch.sh [--delete] MODULE [ARGUMENT...]
#     experiments/tpu/watch.sh --delete demyrl.train --config=configs/grpo_tcr.py:qwen3_4b \
#         --workdir=gs://BUCKET/runs/x
#
# --delete   delete the machine when the command is done
#
# The workdir must be in a bucket: a machine that is taken away loses its disks, and the same command
# with the same workdir goes on from its last checkpoint. Started a second time, watch.sh takes up
# what is there. It gives up after TPU_TRIES failures in a row to get a machine, or when the command
# ends with an error after TPU_RESTARTS new starts.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
delete_in_the_end=no
if [[ ${1:-} == --delete ]]; then
  delete_in_the_end=yes
  shift
fi
[[ $# -gt 0 && $1 != -* ]] || refuse "no module: name one, such as demyrl.train (--help says more)."
workdir=
for word in "$@"; do
  case $word in --workdir=*) workdir=${word#--workdir=} ;; esac
done
[[ $workdir == gs://?* ]] ||
  refuse "--workdir is '$workdir': write --workdir=gs://BUCKET/FOLDER, as disks do not survive."
read_settings

# What the command does, of all workers: running, done, failed CODE, or none; empty where they
# cannot be asked. One that was killed counts as none.
progress() {
  local answers
  answers=$(worker all status) || return 0
  if grep -q running <<<"$answers"; then
    echo running
  elif grep -q failed <<<"$answers"; then
    grep -o -m 1 'failed [0-9]*' <<<"$answers"
  elif grep -q -e lost -e none <<<"$answers"; then
    echo none
  elif grep -q 'done' <<<"$answers"; then
    echo 'done'
  fi
}

install_and_start() {
  "$here/install.sh" && "$here/run.sh" "$@"
}

renew() {
  "$here/delete.sh" && "$here/create.sh" && install_and_start "$@"
}

finish() {
  note "done: $*"
  if [[ $delete_in_the_end == yes ]]; then
    "$here/delete.sh"
  else
    note "$TPU_NAME is still there and goes on to cost: delete.sh deletes it"
  fi
  exit 0
}

# A command killed by a preemption ends some seconds before the machine does, so an error counts
# only when it is still there at the next look.
tries=0 restarts=0 seen=
while true; do
  now=$(state)
  does=
  case $now in
    READY)
      does=$(progress)
      case $does in
        running) tries=0 ;;
        'done') finish "$@" ;;
        none)
          note "nothing runs on $TPU_NAME"
          install_and_start "$@" || tries=$((tries + 1))
          ;;
        failed*)
          if [[ $seen == "$does" ]]; then
            restarts=$((restarts + 1))
            ((restarts <= TPU_RESTARTS)) ||
              give_up "the command failed again and again: see log.sh. $TPU_NAME still costs."
            note "the command $does: starting it again, $restarts of $TPU_RESTARTS"
            "$here/stop.sh" && "$here/run.sh" "$@" || tries=$((tries + 1))
            does=
          fi
          ;;
        *) note "the workers of $TPU_NAME cannot be asked" ;;
      esac
      ;;
    PREEMPTED | SUSPENDED | TERMINATED | STOPPED | FAILED | MISSING)
      note "$TPU_NAME is $now: making it again"
      if renew "$@"; then
        tries=0
      else
        tries=$((tries + 1))
      fi
      ;;
    *) note "$TPU_NAME is $now" ;;
  esac
  ((tries < TPU_TRIES)) || give_up "$tries failures in a row: the reasons stand above."
  seen=$does
  sleep "$TPU_POLL_S"
done
