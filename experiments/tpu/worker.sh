#!/usr/bin/env bash
#
# What the other scripts have a TPU worker do; it is not meant to be called by hand.
#
#     worker.sh install PYTHON EXTRAS SETUP    make ~/demyrl-env, then run SETUP, if any
#     worker.sh start MODULE [ARGUMENT...]     run python -m MODULE in ~/demyrl, behind
#     worker.sh status                         running, done, failed CODE, lost or none
#     worker.sh log                            show its output, and follow it
#     worker.sh stop                           end it
#     worker.sh copy FROM TO                   a folder from or to a bucket

set -euo pipefail
sources=$HOME/demyrl
environment=$HOME/demyrl-env
record=$HOME/demyrl-run # of the command that was started last: log, pid, code

install() {
  local version=$1 extras=$2 setup=$3
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv >/dev/null || python3 -m pip install --user --quiet uv
  uv venv --quiet --allow-existing --python "$version" "$environment"
  uv pip install --quiet --python "$environment/bin/python" --editable "${sources}[$extras]"
  if [[ -n $setup ]]; then
    cd "$sources"
    PATH="$environment/bin:$PATH" bash -c "$setup"
  fi
  echo installed
}

# Whether the process that was started last is alive; its number may be another's after a reboot.
alive() {
  [[ -r $record/pid ]] && grep -qs supervise "/proc/$(<"$record/pid")/cmdline"
}

start() {
  if alive; then
    echo "a command is running already: stop.sh ends it" >&2
    exit 1
  fi
  local tenths
  mkdir -p "$record"
  rm -f "$record/code" "$record/pid"
  DEMYRL_PROCESSES=auto PYTHONUNBUFFERED=1 nohup setsid \
    bash "${BASH_SOURCE[0]}" supervise "$@" >>"$record/log" 2>&1 </dev/null &
  for ((tenths = 0; tenths < 100; tenths++)); do
    if [[ -s $record/pid ]]; then
      echo started
      return
    fi
    sleep 0.1
  done
  echo "the command did not start in 10 seconds: see $record/log" >&2
  exit 1
}

# Runs the command as the leader of its process group, and leaves its exit code.
supervise() {
  local code=0
  echo "== $(date -u +%FT%TZ) $*"
  cd "$sources"
  trap : TERM # it is meant for the command, whose code is to be left
  echo $$ >"$record/pid"
  "$environment/bin/python" -m "$@" || code=$?
  echo "$code" >"$record/code"
}

status() {
  if alive; then
    echo running
  elif [[ ! -r $record/pid ]]; then
    echo none
  elif [[ ! -r $record/code ]]; then
    echo lost
  elif [[ $(<"$record/code") == 0 ]]; then
    echo 'done'
  else
    echo "failed $(<"$record/code")"
  fi
}

log() {
  if [[ ! -r $record/log ]]; then
    echo "nothing was started on this worker yet" >&2
    exit 1
  fi
  tail -n 100 -F "$record/log"
}

stop() {
  local group tenths
  if alive; then
    group=$(<"$record/pid")
    kill -TERM -- "-$group"
    for ((tenths = 0; tenths < 300; tenths++)); do
      alive || break
      sleep 0.1
    done
    if alive; then kill -KILL -- "-$group"; fi
  fi
  echo stopped
}

copy() {
  cd "$sources"
  if [[ $2 != gs://* ]]; then mkdir -p "$2"; fi
  gcloud storage rsync --recursive --exclude='(.*/)?writing_.*' "$1" "$2"
}

case ${1:-} in
  install | start | supervise | status | log | stop | copy) "$@" ;;
  *)
    sed -n '3,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
