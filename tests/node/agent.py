"""An agent as it may be in an image: it needs Python alone, and asks for one completion. To its
verifier it leaves the row that it has seen, and it would like a better reward.

It fails if it sees anything of its job, or of an episode before it.
"""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

directory, used = Path(os.environ["SLUICE_EPISODE"]), Path("/tmp/used")
row = json.loads((directory / "row.json").read_text())
account = Path("/var/run/secrets/kubernetes.io/serviceaccount").exists()
secrets = [name for name in os.environ if "TOKEN" in name or "SECRET" in name]
if account or secrets or used.exists() or os.environ["SLUICE_PROMPT"] != row["prompt"]:
    sys.exit(f"account: {account}, secrets: {secrets}, used: {used.exists()}, row: {row}")
used.touch()
if row["group"] == int(os.environ["HANGS_AT"]) and row["sample"] == 0:
    time.sleep(3600)
body = json.dumps({"model": "any", "prompt": row["prompt"], "max_tokens": 4}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer of-nobody"}
address = f"{os.environ['OPENAI_BASE_URL']}/completions"
with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=120) as answer:
    json.load(answer)
artifacts = Path(os.environ.get("SLUICE_ARTIFACTS", "/nowhere"))
if artifacts.exists():  # there is a verifier
    (artifacts / "row.json").write_text(json.dumps(row))
    (directory / "result.json").write_text('{"reward": 1}')
