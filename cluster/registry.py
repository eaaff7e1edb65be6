"""Policy registries by kind and name, with lazy imports.

To add a policy, write one file and add one entry here, or in another package an entry point of the kind's group, as
``mine = "package.module:Mine"`` of ``sightline.pruner`` or ``sightline.refresh_policy``; configuration, its schema, the
command line and the shared test matrix look it up by name. A policy's options are its dataclass fields or keyword-only
parameters.
"""

import difflib
import importlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from cluster.errors import ConfigError

T = TypeVar("T")


MOST_COMPARED = 1000
"""Beyond this many names none is suggested: the closest is rarely the intended one, and comparing 10,000 would stall a
shared process for 20 ms."""


def near(name: object, known: Collection[str]) -> str:
    """``; did you mean 'x'?`` if a ``known`` name is close, else an empty string."""
    close = difflib.get_close_matches(str(name), known, n=1) if len(known) <= MOST_COMPARED else ()
    return f"; did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """Maps names to objects that are imported on first use.

    ``kind`` appears in error messages ("pruner", "refresh policy"). An entry is the object itself, or its location as
    ``"module:name"``.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str] | None = None) -> None:
        self.kind = kind
        self._entries = dict(entries or {})
        self._searched = False

    def register(self, name: str, entry: T | str) -> None:
        """Add an entry. Raises ``RuntimeError``: the name is taken."""
        if name in self._entries:
            raise RuntimeError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """The entry called ``name``. Raises ``ConfigError``: unknown name; the message lists the known names and
        suggests the closest."""
        if name not in self:
            raise ConfigError(self.unknown(name))
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = cast(T, getattr(importlib.import_module(module), attribute))
        return entry

    def unknown(self, name: str) -> str:
        return f"unknown {self.kind} {name!r}{near(name, self.names()) or ';'} there are: {', '.join(self.names())}"

    def names(self) -> list[str]:
        self._add_installed()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            self._add_installed()
        return name in self._entries

    def _add_installed(self) -> None:
        """Add the entry points of installed packages; reading all their metadata takes a moment."""
        if not self._searched:
            from importlib.metadata import entry_points

            self._searched = True
            for point in entry_points(group=f"sightline.{self.kind.lower().replace(' ', '_')}"):
                self.register(point.name, point.value)


pruners: Registry[Any] = Registry(
    "pruner",
    {
        "codecsight": "cluster.vision.pruners.baselines:CodecSight",
        "none": "cluster.vision.pruners.baselines:KeepAll",
        "replenish": "cluster.vision.pruners.replenish:Replenish",
    },
)
families: Registry[Any] = Registry(
    "model family",
    {
        "internvl": "cluster.models.internvl:InternVL",
        "llava_next_video": "cluster.models.llava_next_video:LlavaNextVideo",
        "llava_onevision": "cluster.models.llava_onevision:LlavaOnevision",
        "qwen2_5_vl": "cluster.models.qwen2_5_vl:Qwen25VL",
        "qwen2_vl": "cluster.models.qwen2_vl:Qwen2VL",
        "qwen3_vl": "cluster.models.qwen3_vl:Qwen3VL",
    },
)
refresh_policies: Registry[Any] = Registry(
    "refresh policy",
    {
        "all": "cluster.engine.window.refresh.counters:All",
        "anchors": "cluster.engine.window.refresh.counters:Anchors",
        "budget": "cluster.engine.window.refresh.counters:Budget",
        "first_n": "cluster.engine.window.refresh.counters:FirstN",
        "first_percent": "cluster.engine.window.refresh.narrowing:FirstPercent",
        "none": "cluster.engine.window.refresh.counters:Nothing",
        "random": "cluster.engine.window.refresh.counters:Random",
        "shifted": "cluster.engine.window.refresh.counters:Shifted",
        "topk_deviation": "cluster.engine.window.refresh.narrowing:TopKDeviation",
    },
)
kernels: Registry[Any] = Registry(
    "attention kernel",
    {
        "cpu_flash": "cluster.engine.native.kernels.blocks:CPUFlashKernel",
        "sdpa": "cluster.engine.native.kernels.blocks:SDPAKernel",
        "slots": "cluster.engine.native.kernels.slots:SlotsKernel",
    },
)
compressors: Registry[Any] = Registry(
    "compressor",
    {
        "cords": "cluster.memory.compress.cords:CoRDS",
        "infinipot": "cluster.memory.compress.attention:InfiniPot",
        "infinipot_v": "cluster.memory.compress.infinipot_v:InfiniPotV",
        "infinipot_v_paper": "cluster.memory.compress.infinipot_v:InfiniPotVPaper",
        "livevlm": "cluster.memory.compress.attention:LiveVLM",
        "none": "cluster.memory.compress.simple:Full",
        "novelty": "cluster.memory.compress.novelty:Novelty",
        "sliding": "cluster.memory.compress.simple:Sliding",
        "snapkv": "cluster.memory.compress.attention:SnapKV",
        "streammem": "cluster.memory.compress.attention:StreamMem",
        "uniform": "cluster.memory.compress.simple:Uniform",
    },
)
organisers: Registry[Any] = Registry(
    "organiser",
    {
        "frames": "cluster.memory.organise.simple:Frames",
        "kvmu": "cluster.memory.organise.resv:KVMU",
        "mosaic": "cluster.memory.organise.mosaic:Mosaic",
        "resv": "cluster.memory.organise.resv:ReSV",
        "tokens": "cluster.memory.organise.simple:Tokens",
    },
)
retrievers: Registry[Any] = Registry(
    "retriever",
    {
        "rekv": "cluster.memory.retrieve.rekv:ReKV",
        "top_k": "cluster.memory.retrieve.nearest:TopK",
        "two_stage": "cluster.memory.retrieve.nearest:TwoStage",
        "wicsum": "cluster.memory.retrieve.wicsum:WiCSum",
    },
)
frame_retrievals: Registry[Any] = Registry(
    "frame retrieval",
    {"resv": "cluster.memory.frame_retrieval:ReSVFrames"},
)
tiers: Registry[Any] = Registry(
    "KV tier",
    {
        "host": "cluster.memory.tiers.arena:Arena",
        "node": "cluster.memory.tiers.remote:RemoteTier",
        "redis": "cluster.memory.tiers.redis:RedisTier",
    },
)
window_orders: Registry[Any] = Registry(
    "window order",
    {
        "arrival": "cluster.replica.window_queue:Arrival",
        "deadline": "cluster.replica.window_queue:Deadline",
    },
)
sinks: Registry[Any] = Registry(
    "alert sink",
    {
        "alertmanager": "cluster.alerts.sinks.http:AlertmanagerSink",
        "homeassistant": "cluster.alerts.sinks.homeassistant:HomeAssistantSink",
        "kafka": "cluster.alerts.sinks.kafka:KafkaSink",
        "log": "cluster.alerts.sinks.log:LogSink",
        "mqtt": "cluster.alerts.sinks.mqtt:MqttSink",
        "notify": "cluster.alerts.sinks.notify:NotifySink",
        "webhook": "cluster.alerts.sinks.http:WebhookSink",
    },
)
