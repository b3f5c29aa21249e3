"""Names that programs which play episodes have in common with sluice, wherever they run; and, of
those in pods, what a worker, the pod's sidecar and the program's shell agree on.
"""

from __future__ import annotations

PATH = "/episode-pods"
"""Where a pod joins its worker, beside the gateway."""
HEARTBEAT_SECONDS = 15.0
MOST_BYTES = 64 * 2**20
"""Of a request to the gateway, and of a message to or from a pod: a row of a million tokens, which
has its chat twice, takes a fifth of it."""
MOST_RESULT_BYTES = 4 * 2**20
ROW, RESULT, ARTIFACTS = "row.json", "result.json", "artifacts"
MOST_ARTIFACTS, MOST_ARTIFACT_BYTES, MOST_DEPTH = 1000, 16 * 2**20, 16
"""Of what a program leaves to its verifier: files and directories, bytes in all, and levels of
directories."""
EPISODE, VERIFIER = "episode", "verifier"
"""Pods that play episodes, and pods that judge them: their roles, and their containers."""
VARIABLES, ERRORS, STATUS, TAKEN = ".variables", ".errors", ".status", ".taken"
"""Files of an episode's directory: the row's variables as a shell reads them, the program's
standard error, its exit status; and the sign that its container was told to end."""
SHELL = f"""\
trap ': > "$SLUICE_EPISODE/{TAKEN}"; exit 143' TERM
until [ -e "$SLUICE_EPISODE/{ROW}" ]; do sleep 0.2; done
. "$SLUICE_EPISODE/{VARIABLES}"
"$@" 2> "$SLUICE_EPISODE/{ERRORS}" &
wait $!
status=$?
cat "$SLUICE_EPISODE/{ERRORS}" >&2
echo $status > "$SLUICE_EPISODE/{STATUS}.new"
mv "$SLUICE_EPISODE/{STATUS}.new" "$SLUICE_EPISODE/{STATUS}"
exit $status
"""
"""Runs the program ("$@") once there is an episode. The user's image needs a shell, and no more. It
waits for the program in a way that a signal ends: the first process of a container has no other."""
