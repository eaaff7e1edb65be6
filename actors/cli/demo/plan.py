"""What the demo shows: four cameras, two questions, and the configuration a user can run again by hand."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2


@dataclass(frozen=True, slots=True)
class DemoCamera:
    """One camera of the demo; named after its clip. ``pushed``: an agent sends it over gRPC."""

    name: str
    pushed: bool

    @property
    def fed_by(self) -> str:
        return "gRPC push" if self.pushed else "file (pull)"


CAMERAS = (
    DemoCamera("street", pushed=False),
    DemoCamera("night", pushed=False),
    DemoCamera("noisy", pushed=True),
    DemoCamera("hevc", pushed=True),
)
CLIP_SECONDS = 24.0

CONFIG = """\
# yaml-language-server: $schema={{ schema }}
# What `sightline demo` ran. Run it again by hand:
#
#   sightline serve -c {{ here | shell }}
{% for camera in cameras if camera.pushed %}
#   sightline push {{ clips[camera.name] | shell }} --to 127.0.0.1:50051 --camera {{ camera.name }} --realtime --loop
{% endfor %}
#   sightline watch
model:
  name: {{ model | quoted }}

engine: {{ engine }}

# Shorter than the default of 40 s every 8 s, so that the demo need not take minutes.
window:
  length_s: 24
  stride_s: 4

questions:
  - id: person
    text: Is there a person in the picture?
  - id: vehicle
    text: Is a vehicle moving on the road?

cameras:
{% for camera in cameras %}
  - name: {{ camera.name }}
{% if camera.pushed %}
    source: "" # an agent pushes it, see above
{% else %}
    source: {{ clips[camera.name] | quoted }}
    source_options: {loop: true, realtime: true}
{% endif %}
{% endfor %}
"""


def write_config(folder: Path, clips: dict[str, Path], model: str, engine: str) -> Path:
    """Write ``config.yaml`` into ``folder``; returns its path."""
    path = folder / "config.yaml"
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {"quoted": _quoted, "shell": lambda path: shlex.quote(str(path))}
    template = environment.from_string(CONFIG)
    path.write_text(
        template.render(cameras=CAMERAS, clips=clips, model=model, engine=engine, here=path, schema="schema.json"),
        encoding="utf-8",
    )
    return path


def _quoted(text: object) -> str:
    """As a YAML string, whatever is in it."""
    return "'" + str(text).replace("'", "''") + "'"
