"""A verifier as it may be in an image. It fails if it sees anything of its job or of an episode
before it, or if the program was shown what is only for it.
"""

import json
import os
import sys
from pathlib import Path

directory, used = Path(os.environ["SLUICE_EPISODE"]), Path("/tmp/used")
row = json.loads((directory / "row.json").read_text())
seen = json.loads(Path(os.environ["SLUICE_ARTIFACTS"], "row.json").read_text())
account = Path("/var/run/secrets/kubernetes.io/serviceaccount").exists()
ours = [name for name in os.environ if any(w in name for w in ("TOKEN", "SECRET", "OPENAI"))]
if account or ours or used.exists() or seen["label"] is not None or seen["group"] != row["group"]:
    sys.exit(f"account: {account}, variables: {ours}, used: {used.exists()}, seen: {seen}")
used.touch()
if row["label"] is None or os.environ["SLUICE_LABEL"] != str(row["label"]):
    sys.exit(f"no label: {row}")

(directory / "result.json").write_text(json.dumps({"reward": 0.25}))
