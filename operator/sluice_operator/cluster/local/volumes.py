"""Volumes of a laptop's pods: directories, and files from config maps and secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice_operator.cluster.local.translate import (
    PodError,
    all_containers,
    mount_paths,
    object_data,
    translate,
)
from sluice_operator.plan.facts.model import KubeObject


def prepare(
    pod: KubeObject,
    run_dir: Path,
    pod_dir: Path,
    chosen: Mapping[str, Path],
    objects: Mapping[str, KubeObject],
) -> dict[str, Path]:
    """Create all volumes of the pod, and return their directories by volume name.

    Volumes of one persistent claim share a directory. An emptyDir keeps its content between
    attempts, as the whole run directory does.

    Parameters
    ----------
    pod
        The pod's manifest.
    run_dir, pod_dir
        Directories of the run and of the pod.
    chosen
        Directories for some volume names in place of `<run_dir>/volumes/<name>`.
    objects
        Config maps and secrets by "Kind/name".

    Raises
    ------
    PodError
        A volume needs a cluster, or its source does not exist.

    """
    directories: dict[str, Path] = {}
    files: list[tuple[Path, dict[str, str]]] = []
    for volume in pod["spec"].get("volumes", []):
        name = volume["name"]
        source = _file_source(volume, objects)
        if source is not None:
            directories[name] = pod_dir / name
            files.append((directories[name], _files(volume, source)))
        else:
            directories[name] = chosen.get(name) or _directory(volume, run_dir)
    _make_sub_paths(pod, directories)
    for directory, texts in files:
        _write_files(directory, texts, pod, directories)
    return directories


def _directory(volume: dict[str, Any], run_dir: Path) -> Path:
    name = volume["name"]
    if "hostPath" in volume:
        path = Path(volume["hostPath"]["path"])
        if volume["hostPath"].get("type", "").endswith("OrCreate"):
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise PodError(f"volume {name}: {path} does not exist on this machine")
        return path
    if "persistentVolumeClaim" in volume:
        directory = run_dir / "volumes" / str(volume["persistentVolumeClaim"]["claimName"])
    elif "emptyDir" in volume or "ephemeral" in volume:
        directory = run_dir / "volumes" / str(name)
    else:
        kinds = ", ".join(key for key in volume if key != "name")
        raise PodError(
            f"volume {name}: {kinds} needs a cluster; use hostPath, or leave the volume out and "
            "give a path"
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _file_source(volume: dict[str, Any], objects: Mapping[str, KubeObject]) -> KubeObject | None:
    for field, kind, key in (
        ("configMap", "ConfigMap", "name"),
        ("secret", "Secret", "secretName"),
    ):
        if field in volume:
            source = objects.get(f"{kind}/{volume[field][key]}")
            if source is None and not volume[field].get("optional"):
                raise PodError(
                    f"volume {volume['name']}: {kind} {volume[field][key]} does not exist in this "
                    "run"
                )
            return source or {}
    return None


def _make_sub_paths(pod: KubeObject, volumes: Mapping[str, Path]) -> None:
    for container in all_containers(pod):
        for mount in container.get("volumeMounts", []):
            if mount.get("subPath") and mount["name"] in volumes:
                (volumes[mount["name"]] / mount["subPath"]).mkdir(parents=True, exist_ok=True)


def _files(volume: dict[str, Any], source: KubeObject) -> dict[str, str]:
    """Return the texts of files by name: all keys of the object, or the volume's `items`."""
    texts = object_data(source)
    reference = volume.get("secret") or volume.get("configMap") or {}
    if "items" not in reference:
        return texts
    chosen = {}
    for item in reference["items"]:
        if item["key"] in texts:
            chosen[item["path"]] = texts[item["key"]]
        elif not reference.get("optional"):
            raise PodError(f"volume {volume['name']}: its source has no key {item['key']}")
    return chosen


def _write_files(
    directory: Path, texts: Mapping[str, str], pod: KubeObject, volumes: Mapping[str, Path]
) -> None:
    """Write a file for each text, with mount paths translated.

    The manifest that pods read contains the mount path of the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths: dict[str, str] = {}
    for container in all_containers(pod):
        paths |= mount_paths(container, volumes)
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(translate(text, paths))
