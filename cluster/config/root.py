"""The whole configuration: resolves cameras over the global sections and cross-checks keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from cluster.config.alerts import AlertsConfig, ClipsConfig
from cluster.config.camera import (
    CameraConfig,
    CameraEntry,
    PruningConfig,
    QuestionConfig,
    SamplingConfig,
    SourceConfig,
    WindowConfig,
)
from cluster.config.cluster import ClusterConfig, GatewayConfig, KubernetesConfig, SchedulingConfig, TracingConfig
from cluster.config.memory import AskingConfig, MemoryConfig, TiersConfig
from cluster.config.model import ModelConfig, SimulatedConfig, VllmConfig
from cluster.config.policies import MEMORY_POLICIES, memory_problems, pruning_problems
from cluster.config.problems import ConflictError, InvalidConfigError, KeyPath, Problem, Section, size_text
from cluster.config.security import SecurityConfig
from cluster.errors import ConfigError
from cluster.hosts import is_loopback


def conflicts(config: SightlineConfig) -> list[Problem]:
    """All contradictions within ``config``."""
    found = _repeated_questions(config.questions, ("questions",))
    found += _section_conflicts(every_camera(config), (), None, config.tiers)
    seen: set[str] = set()
    for index, entry in enumerate(config.cameras):
        path: KeyPath = ("cameras", index)
        if entry.name in seen:
            found.append(Problem((*path, "name"), f"two cameras are called {entry.name!r}; names must be unique"))
        seen.add(entry.name)
        blamed = {problem.path for problem in found}
        own = camera_conflicts(resolve(config, entry), path, entry, config.tiers)
        found += [each for each in own if each.path not in blamed]
    return [*found, *_process_conflicts(config), *_access_conflicts(config)]


def _process_conflicts(config: SightlineConfig) -> Iterator[Problem]:
    cluster, gateway = config.cluster, config.gateway
    beat_s, most = cluster.heartbeat_s, cluster.max_decoders
    if cluster.heartbeat_timeout_s <= beat_s:
        message = f"must be above heartbeat_s = {beat_s:g}, not {cluster.heartbeat_timeout_s:g}"
        yield Problem(("cluster", "heartbeat_timeout_s"), message)
    if most is not None and most < cluster.decoders:
        yield Problem(("cluster", "max_decoders"), f"must be at least decoders = {cluster.decoders}, not {most}")
    if config.engine == "vllm":
        stall_s, batch_s = cluster.stall_timeout_s, config.vllm.timeout_s
        if batch_s >= stall_s:
            message = (
                f"must be below cluster.stall_timeout_s = {stall_s:g}, not {batch_s:g}: the replica would be replaced "
                "before its engine core is given up"
            )
            yield Problem(("vllm", "timeout_s"), message)
        if config.model.dtype == "float8":
            message = "float8 needs the native engine; use bfloat16, and quantization: fp8 under vllm.arguments"
            yield Problem(("model", "dtype"), message)
        if config.memory.frame_retrieval is not None:
            message = "vllm keeps no memory that frames could read; use the native engine, or set null"
            yield Problem(("memory", "frame_retrieval"), message)
    if gateway.port and gateway.port == gateway.http_port:
        yield Problem(("gateway", "http_port"), f"must differ from port, both are {gateway.port}")
    for key in ("port", "http_port"):
        if cluster.metrics_port is not None and getattr(gateway, key) in cluster.metrics_ports:
            first, last = cluster.metrics_ports[0], cluster.metrics_ports[-1]
            message = f"must not be in {first} to {last}, which other processes use from cluster.metrics_port on"
            yield Problem(("gateway", key), message)
    if cluster.gateways > 1 and cluster.placement.gateway is None and (gateway.port or gateway.http_port):
        message = (
            f"{cluster.gateways} gateways on the same ports need a node each; set cluster.placement.gateway to a Ray "
            "resource of which each such node offers 1, or gateway.port and gateway.http_port to 0"
        )
        yield Problem(("cluster", "gateways"), message)
    if gateway.max_packet_bytes > cluster.packet_queue_bytes:
        message = f"must be at least gateway.max_packet_bytes = {gateway.max_packet_bytes}, or such a packet never fits"
        yield Problem(("cluster", "packet_queue_bytes"), message)


def _access_conflicts(config: SightlineConfig) -> Iterator[Problem]:
    security, host, redis = config.security, config.gateway.host, config.tiers.redis_url
    if not security.guarded and not security.allow_unauthenticated and not is_loopback(host):
        message = (
            f"{host} accepts other machines without authentication; set security.tokens_file (`sightline tokens "
            "create` makes one), security.oidc, or security.allow_unauthenticated: true"
        )
        yield Problem(("gateway", "host"), message)
    plaintext = security.internal_tls.certificate is None and not security.allow_plain_inside
    if plaintext and config.cluster.ray_address is not None:
        message = (
            "processes of a Ray cluster reach each other over the network, and without TLS anyone on it reaches them; "
            "give certificate, key and ca, or set security.allow_plain_inside: true"
        )
        yield Problem(("security", "internal_tls"), message)
    here = redis is None or redis.startswith("unix://") or is_loopback(urlsplit(redis).hostname or "")
    if not here and security.memory_key_file is None:
        message = (
            "anyone who can write to a Redis on another machine could forge memories; name a file with a secret that "
            "all processes share (`openssl rand -hex 32 > FILE` makes one)"
        )
        yield Problem(("security", "memory_key_file"), message)


def camera_conflicts(camera: CameraConfig, path: KeyPath, entry: CameraEntry, tiers: TiersConfig) -> list[Problem]:
    """Contradictions within one camera's resolved settings, or with ``tiers``; ``path`` leads to its entry."""
    found = []
    if not camera.questions:
        message = f"camera {camera.name!r} has no question; add one here, or one for all cameras under questions:"
        found.append(Problem((*path, "questions"), message))
    if entry.questions:
        found += _repeated_questions(entry.questions, (*path, "questions"))
    return [*found, *_section_conflicts(camera, path, entry, tiers)]


def _section_conflicts(
    camera: CameraConfig, path: KeyPath, entry: CameraEntry | None, tiers: TiersConfig
) -> Iterator[Problem]:
    """Contradictions within the merged sections, located at the camera's key if set, else at the global one."""

    def at(section: str, key: str) -> KeyPath:
        own = getattr(entry, section) if entry is not None else None
        if own is not None and key in own.model_fields_set:
            return (*path, section, key)
        return ({"source_options": "source"}.get(section, section), key)

    window, sampling, backoff = camera.window, camera.sampling, camera.source_options.backoff
    if window.stride_s > window.length_s:
        message = f"must not exceed the window's length_s = {window.length_s:g}, not {window.stride_s:g}"
        yield Problem(at("window", "stride_s"), message)
    if sampling.anchor_interval_s > window.length_s:
        message = f"must not exceed window.length_s = {window.length_s:g}, not {sampling.anchor_interval_s:g}"
        yield Problem(at("sampling", "anchor_interval_s"), message)
    if window.length_s * sampling.fps < 1:
        message = f"at {sampling.fps:g} frames per second a window of {window.length_s:g} s would hold no frame"
        yield Problem(at("sampling", "fps"), message)
    policies = {"pruning": pruning_problems(camera.pruning), "memory": memory_problems(camera.memory)}
    for section, problems in policies.items():
        for problem in problems:
            key = at(section, str(problem.path[0]))
            yield Problem((*key, *problem.path[1:]), problem.message)
    cap = camera.memory.cap or 0
    too_small = [(name, room) for name, room in tiers.rooms.items() if cap > room]
    if camera.memory.enabled and too_small:
        name, room = too_small[0]
        message = f"must not exceed tiers.{name} = {size_text(room)}, not {size_text(cap)}; lower it or raise that"
        yield Problem(at("memory", "cap"), message)
    if backoff.max_s < backoff.initial_s:
        message = f"must not be below initial_s = {backoff.initial_s:g}, not {backoff.max_s:g}"
        yield Problem((*at("source_options", "backoff"), "max_s"), message)


def _repeated_questions(questions: list[QuestionConfig], path: KeyPath) -> list[Problem]:
    ids = [question.id for question in questions]
    return [
        Problem((*path, index, "id"), f"two questions are called {id_!r}; ids must be unique")
        for index, id_ in enumerate(ids)
        if id_ in ids[:index]
    ]


S = TypeVar("S", bound=Section)

_OPTIONS_OF: Mapping[type[Section], Mapping[str, str]] = {
    PruningConfig: {"policy": "options"},
    MemoryConfig: {kind: f"{kind}_options" for kind in MEMORY_POLICIES},
}
"""Section -> key that names a policy -> key with its options."""


def deep_merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``override`` over ``base``: mappings merge key by key, anything else (lists too) is replaced."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def overlay(base: S, override: S | None) -> S:
    """The section ``base`` with the keys set in ``override``."""
    if override is None:
        return base
    written = override.model_dump(exclude_unset=True)
    below = base.model_dump()
    for policy, options in _OPTIONS_OF.get(type(base), {}).items():
        if written.get(policy, below[policy]) != below[policy]:
            # The global options are parameters of another policy.
            below[options] = {}
    return type(base).model_validate(deep_merge(below, written))


def resolve(config: SightlineConfig, entry: CameraEntry) -> CameraConfig:
    """Resolve a camera's settings without checking them. An anchor interval that is not set anywhere is capped at the
    window's length."""
    sampling, window = overlay(config.sampling, entry.sampling), overlay(config.window, entry.window)
    if not any(each and "anchor_interval_s" in each.model_fields_set for each in (config.sampling, entry.sampling)):
        interval = min(sampling.anchor_interval_s, window.length_s)
        sampling = sampling.model_copy(update={"anchor_interval_s": interval})
    return CameraConfig(
        name=entry.name,
        source=entry.source,
        paused=entry.paused,
        priority=entry.priority,
        sampling=sampling,
        pruning=overlay(config.pruning, entry.pruning),
        window=window,
        memory=overlay(config.memory, entry.memory).with_cap(config.model, config.tiers),
        source_options=overlay(config.source, entry.source_options),
        decode=entry.decode or config.cluster.decode,
        questions=config.questions if entry.questions is None else entry.questions,
        privacy_masks=entry.privacy_masks,
        zones=entry.zones,
    )


def every_camera(config: SightlineConfig) -> CameraConfig:
    """Resolved settings of a camera that overrides nothing."""
    return resolve(config, CameraEntry(name="every-camera"))


def camera_settings(config: SightlineConfig, camera: str | CameraEntry) -> CameraConfig:
    """Resolve and check the settings of a camera in the configuration (by name) or of one added at run time (by entry).
    Raises ``ConfigError``: no camera of that name, or contradicting settings."""
    if isinstance(camera, str):
        entries = [entry for entry in config.cameras if entry.name == camera]
        if not entries:
            known = ", ".join(entry.name for entry in config.cameras) or "none"
            raise ConfigError(f"there is no camera {camera!r} in the configuration; there are: {known}")
        camera = entries[0]
    resolved = resolve(config, camera)
    found = camera_conflicts(resolved, (), camera, config.tiers)
    if found:
        raise InvalidConfigError(found, where=f"camera {camera.name}")
    return resolved


class SightlineConfig(Section):
    """Configuration of a cluster. Camera sections apply to every camera unless it overrides them."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model and its device."""
    engine: Literal["native", "vllm", "simulated"] = "native"
    """Inference engine: native computes only what changed; vllm runs windows on vLLM, which must be installed
    (docs/vllm.md); simulated runs no model and is for load tests only."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of vLLM, with engine: vllm."""
    simulated: SimulatedConfig = Field(default_factory=SimulatedConfig)
    """Step times and answers of the simulated engine."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling of frames."""
    pruning: PruningConfig = Field(default_factory=PruningConfig)
    """Pruning of patches."""
    window: WindowConfig = Field(default_factory=WindowConfig)
    """The window a question is answered on."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """Each camera's memory of video beyond its window."""
    source: SourceConfig = Field(default_factory=SourceConfig)
    """Connections to cameras."""
    questions: list[QuestionConfig] = Field(default_factory=list)
    """Standing questions of cameras without their own."""
    cameras: list[CameraEntry] = Field(default_factory=list)
    """The cameras; more can be added at run time."""
    tiers: TiersConfig = Field(default_factory=TiersConfig)
    """Storage tiers of camera memories."""
    asking: AskingConfig = Field(default_factory=AskingConfig)
    """Free questions about what a camera has seen, and their limits."""
    alerts: AlertsConfig = Field(default_factory=AlertsConfig)
    """Incident rules and destinations of alerts."""
    clips: ClipsConfig = Field(default_factory=ClipsConfig)
    """Snapshots and clips of incidents, and their limits."""
    scheduling: SchedulingConfig = Field(default_factory=SchedulingConfig)
    """Admission, the quality ladder and the order of windows."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """Ports and limits of the gateway."""
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    """Authentication, TLS, rate limits and the audit log."""
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    """Cameras as resources in Kubernetes."""
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    """Traces of windows, from packet to alert."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Processes, queues and deadlines."""

    @model_validator(mode="after")
    def _no_conflicts(self) -> SightlineConfig:
        found = conflicts(self)
        if found:
            raise ConflictError(found)
        return self
