"""Checks between keys, each with the key to change and what would be right."""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

from cluster.config.camera import CameraConfig, CameraEntry
from cluster.config.policies import memory_problems, pruning_problems
from cluster.config.problems import Path, Problem
from cluster.config.quantity import size_text
from cluster.config.question import QuestionConfig
from cluster.config.root import SightlineConfig
from cluster.config.source import SourceConfig
from cluster.config.tiers import TiersConfig
from cluster.hosts import is_loopback
from cluster.registry import refresh_policies


def conflicts(config: SightlineConfig) -> list[Problem]:
    """Everything that contradicts something else in ``config``."""
    from cluster.config.resolve import resolve

    found = _repeated_questions(config.questions, ("questions",))
    everyone = CameraEntry(name="every-camera")
    found += _section_conflicts(resolve(config, everyone), (), None, config.tiers)
    seen: set[str] = set()
    for index, entry in enumerate(config.cameras):
        path: Path = ("cameras", index)
        if entry.name in seen:
            found.append(Problem((*path, "name"), f"two cameras are called {entry.name!r}; names must be unique"))
        seen.add(entry.name)
        blamed = {problem.path for problem in found}
        own = camera_conflicts(resolve(config, entry), path, entry, config.tiers)
        found += [each for each in own if each.path not in blamed]
    if config.cluster.heartbeat_timeout_s <= config.cluster.heartbeat_s:
        message = (
            f"must be above heartbeat_s = {config.cluster.heartbeat_s:g}, not {config.cluster.heartbeat_timeout_s:g}"
        )
        found.append(Problem(("cluster", "heartbeat_timeout_s"), message))
    stall_s, batch_s = config.cluster.stall_timeout_s, config.vllm.timeout_s
    if config.engine == "vllm" and batch_s >= stall_s:
        message = (
            f"must be below cluster.stall_timeout_s = {stall_s:g}, not {batch_s:g}: the replica would be replaced "
            "before its engine core is given up"
        )
        found.append(Problem(("vllm", "timeout_s"), message))
    gateway = config.gateway
    if gateway.port and gateway.port == gateway.metrics_port:
        found.append(Problem(("gateway", "metrics_port"), f"must differ from port, both are {gateway.port}"))
    open_door = config.security.tokens_file is None and not config.security.allow_unauthenticated
    if open_door and not is_loopback(gateway.host):
        message = (
            f"{gateway.host} lets other machines in, and nobody is asked for a token; name security.tokens_file "
            "(`sightline tokens create` makes one), or set security.allow_unauthenticated: true"
        )
        found.append(Problem(("gateway", "host"), message))
    security = config.security
    plain = security.internal_tls.certificate is None and not security.allow_plain_inside
    if plain and config.cluster.ray_address is not None:
        message = (
            "processes of a Ray cluster reach each other over the network, and without TLS so does whoever is on it; "
            "give certificate, key and ca, or set security.allow_plain_inside: true"
        )
        found.append(Problem(("security", "internal_tls"), message))
    redis = config.tiers.redis_url
    if redis is not None and security.memory_key_file is None and not _on_this_machine(redis):
        message = (
            "whoever can write to a Redis on another machine could forge what cameras remember; name a file with a "
            "secret that is the same for all processes (`openssl rand -hex 32 > FILE` makes one)"
        )
        found.append(Problem(("security", "memory_key_file"), message))
    if gateway.max_packet_bytes > config.cluster.packet_queue_bytes:
        message = f"must be at least gateway.max_packet_bytes = {gateway.max_packet_bytes}, or such a packet never fits"
        found.append(Problem(("cluster", "packet_queue_bytes"), message))
    return found


def camera_conflicts(camera: CameraConfig, path: Path, entry: CameraEntry, tiers: TiersConfig) -> list[Problem]:
    """What contradicts itself or ``tiers`` in one camera's resolved settings; ``path`` leads to its entry."""
    found = []
    if not camera.questions:
        message = f"camera {camera.name!r} has no question; give it one here, or one to all under questions:"
        found.append(Problem((*path, "questions"), message))
    if entry.questions:
        found += _repeated_questions(entry.questions, (*path, "questions"))
    return found + _section_conflicts(camera, path, entry, tiers)


def _section_conflicts(
    camera: CameraConfig, path: Path, entry: CameraEntry | None, tiers: TiersConfig
) -> list[Problem]:
    """Contradictions inside the merged sections, placed at the key the camera wrote, else at the global one."""

    def at(section: str, key: str) -> Path:
        own = getattr(entry, section) if entry is not None else None
        if own is not None and key in own.model_fields_set:
            return (*path, section, key)
        return ({"source_options": "source"}.get(section, section), key)

    found: list[Problem] = []
    window, sampling = camera.window, camera.sampling
    if window.stride_s > window.length_s:
        message = f"must not exceed the window's length_s = {window.length_s:g}, not {window.stride_s:g}"
        found.append(Problem(at("window", "stride_s"), message))
    if sampling.anchor_interval_s > window.length_s:
        message = f"must not exceed window.length_s = {window.length_s:g}, not {sampling.anchor_interval_s:g}"
        found.append(Problem(at("sampling", "anchor_interval_s"), message))
    if window.length_s * sampling.fps < 1:
        message = f"at {sampling.fps:g} frames per second a window of {window.length_s:g} s would hold no frame"
        found.append(Problem(at("sampling", "fps"), message))
    if window.refresh not in refresh_policies:
        found.append(Problem(at("window", "refresh"), refresh_policies.unknown(window.refresh)))
    policies = {"pruning": pruning_problems(camera.pruning), "memory": memory_problems(camera.memory)}
    for section, problems in policies.items():
        for problem in problems:
            key = at(section, str(problem.path[0]))
            found.append(Problem((*key, *problem.path[1:]), problem.message))
    if camera.memory.enabled:
        found += _no_room(camera.memory.cap, tiers, at("memory", "cap"))
    return found + _backoff(camera.source_options, at("source_options", "backoff"))


def _no_room(cap: int, tiers: TiersConfig, path: Path) -> list[Problem]:
    """A camera's cap beyond the room that a whole tier has."""
    rooms = {
        "host_bytes": tiers.host_bytes,
        "node_bytes": tiers.node_bytes if tiers.node else None,
        "camera_bytes": tiers.camera_bytes,
    }
    for key, room in rooms.items():
        if room is not None and cap > room:
            message = f"must not exceed tiers.{key} = {size_text(room)}, not {size_text(cap)}; lower it or raise that"
            return [Problem(path, message)]
    return []


def _on_this_machine(redis_url: str) -> bool:
    return redis_url.startswith("unix://") or is_loopback(urlsplit(redis_url).hostname or "")


def _backoff(source: SourceConfig, path: Path) -> list[Problem]:
    backoff = source.backoff
    if backoff.max_s < backoff.initial_s:
        message = f"must not be below initial_s = {backoff.initial_s:g}, not {backoff.max_s:g}"
        return [Problem((*path, "max_s"), message)]
    return []


def _repeated_questions(questions: list[QuestionConfig], path: Path) -> list[Problem]:
    counts = Counter(question.id for question in questions)
    found = []
    for index, question in enumerate(questions):
        first = next(i for i, other in enumerate(questions) if other.id == question.id)
        if counts[question.id] > 1 and index != first:
            found.append(Problem((*path, index, "id"), f"two questions are called {question.id!r}; ids must be unique"))
    return found
