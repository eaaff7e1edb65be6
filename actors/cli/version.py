"""``sightline version``."""

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
        print(f"{package} {installed(package) or 'not installed'}")


def show(wanted: bool) -> None:
    """Callback of ``--version``."""
    if wanted:
        print(f"sightline {__version__}")
        raise typer.Exit


def installed(package: str) -> str | None:
    """Version of an installed distribution; ``None`` without one."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None
