"""Names that programs which play episodes share with sluice, wherever they run.

For episodes in pods, the worker, the pod's sidecar and the program's shell use them.
"""

from __future__ import annotations

# Path of the gateway at which a pod joins its worker.
PATH = "/episode-pods"
HEARTBEAT_SECONDS = 15.0
# Message to a pod whose episode's time has passed: it sends what its program has left so far.
OVER = "over"
# Limit of a request to the gateway, and of a message to or from a pod. A row of a million tokens,
# which has its chat twice, takes a fifth of it.
MOST_BYTES = 64 * 2**20
MOST_RESULT_BYTES = 4 * 2**20
ROW, RESULT, ARTIFACTS = "row.json", "result.json", "artifacts"
# Limits of what a program leaves to its verifier: files and directories, bytes in all, and levels
# of directories.
MOST_ARTIFACTS, MOST_ARTIFACT_BYTES, MOST_DEPTH = 1000, 16 * 2**20, 16
# Roles of pods that play episodes and of pods that judge them, and names of their containers.
EPISODE, VERIFIER = "episode", "verifier"
# Files of an episode's directory: the row's variables for a shell, the program's standard error,
# its exit status, a mark that its container was told to end, and one that it has started.
VARIABLES, ERRORS, STATUS, TAKEN = ".variables", ".errors", ".status", ".taken"
STARTED = ".started"
# Key of a sample's metadata: the image of its episode's pod, by its digest once that is known.
IMAGE_KEYS = {EPISODE: "episode_image", VERIFIER: "verifier_image"}
# Runs the program ("$@") once there is an episode. The user's image only needs a shell. A signal
# ends `wait` at once, so the trap runs; it would run only after a program in the foreground.
SHELL = f"""\
trap ': > "$SLUICE_EPISODE/{TAKEN}"; exit 143' TERM
: > "$SLUICE_EPISODE/{STARTED}"
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
