"""Services of `make dashboards-up`: their files exist, and Prometheus accepts them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helm import load
from tests.prometheus import promtool
from tests.tools import ROOT

COMPOSE = ROOT / "observability" / "compose"


def mounts() -> dict[str, dict[str, Path]]:
    """Return repository paths by service and container path, without the run directory."""
    services = load((COMPOSE / "compose.yaml").read_text())["services"]
    return {
        name: {
            inside: (COMPOSE / outside).resolve()
            for outside, inside, _ in (mount.rsplit(":", 2) for mount in service["volumes"])
            if not outside.startswith("$")
        }
        for name, service in services.items()
    }


def test_every_file_that_is_mounted_is_there() -> None:
    paths = [path for files in mounts().values() for path in files.values()]
    assert len(paths) == 5
    assert [path for path in paths if not path.exists()] == []


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    """The paths in the container are replaced by those of the repository."""
    inside = mounts()["prometheus"]
    text = (COMPOSE / "prometheus.yaml").read_text()
    for path in re.findall(r"\[(/etc/\S+)\]", text):
        text = text.replace(path, str(inside[path]))
    (tmp_path / "prometheus.yaml").write_text(text)
    checked = promtool("check", "config", tmp_path / "prometheus.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_services_listen_on_the_loopback_only() -> None:
    services = load((COMPOSE / "compose.yaml").read_text())["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
