#!/bin/sh
# Run one stage of the set-up: say what it does and how long it took, and keep its output in a log.
#
#   tools/stage.sh LOG TEXT COMMAND [ARGUMENT...]
log=$1 text=$2
shift 2
started=$(date +%s)
printf '  %-62s' "$text"
if "$@" >>"$log" 2>&1; then
  echo " $(($(date +%s) - started)) s"
else
  code=$?
  echo " failed; the end of $log:"
  tail -n 20 "$log"
  exit "$code"
fi
