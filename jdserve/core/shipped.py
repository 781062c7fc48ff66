"""Files that come with jdserve: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path


def plans() -> Path:
    """The folder with plans, and with clusters in ``clusters/``."""
    package = Path(__file__).parent.parent
    inside = package / "plans"
    return inside if inside.exists() else package.parent / "plans"


def cluster_names() -> tuple[str, ...]:
    """Names of the clusters that come with jdserve."""
    return tuple(sorted(file.stem for file in (plans() / "clusters").glob("*.json")))


def cluster_file(name: str | Path) -> Path:
    """The file at ``name``, else the cluster that comes with jdserve under that name, with or without ``.json``."""
    path = Path(name)
    if not path.exists() and path.name.removesuffix(".json") in cluster_names() and path.parent == Path():
        return plans() / "clusters" / f"{path.name.removesuffix('.json')}.json"
    return path
