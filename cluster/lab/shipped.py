"""YAML files loaded by name when they ship with the package, or by path when they are the user's own."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from cluster.config.load import read_yaml
from cluster.config.problems import Section, from_validation
from cluster.errors import ConfigError

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class ShippedFiles(Generic[S]):
    """The YAML files in ``folder``, validated as ``model``; error messages call one a ``what``."""

    what: str
    folder: Path
    model: type[S]

    def names(self) -> list[str]:
        """Names of the files that ship with the package."""
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def load(self, name: str) -> S:
        """Load a shipped file by name, or any file by path. Raises ``ConfigError`` when there is no such file or it
        is invalid; the message says where."""
        shipped = name in self.names()
        path = self.folder / f"{name}.yaml" if shipped else Path(name)
        if not shipped and not path.is_file():
            raise ConfigError(
                f"there is no {self.what} {name!r}; name a YAML file, or one of: {', '.join(self.names())}"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a {self.what}: {error}") from None
        return self.parse(text, name)

    def parse(self, text: str, where: str) -> S:
        """Parse and validate ``text``. Raises ``ConfigError`` with the line of each problem."""
        document = read_yaml(text, where)
        try:
            return self.model.model_validate(document.data)
        except ValidationError as error:
            problems = [replace(each, line=document.line(each.path)) for each in from_validation(error, self.model)]
            raise ConfigError("; ".join(each.sentence(where) for each in problems)) from None
