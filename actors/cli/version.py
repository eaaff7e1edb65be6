"""``sightline version``."""

from __future__ import annotations

import typer

from cluster import __version__


def version() -> None:
    """Print the versions of Sightline and of its main dependencies.

    $ sightline version
    """
    import platform

    print(f"sightline {__version__}")
    print(f"python {platform.python_version()}")
    for package in ("torch", "transformers", "av", "ray", "grpcio"):
        print(f"{package} {_installed(package)}")


def show(wanted: bool) -> None:
    """Callback of ``--version``."""
    if wanted:
        print(f"sightline {__version__}")
        raise typer.Exit


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        return installed_version(package)
    except PackageNotFoundError:
        return "not installed"
