"""Configuration: one closed, described model per concern; global sections that each camera may override.

``load_config`` reads a file, ``camera_settings`` resolves one camera, ``schema`` describes all of it.
"""

from cluster.config.asking import AskingConfig
from cluster.config.camera import CameraConfig, CameraEntry
from cluster.config.cluster import ClusterConfig
from cluster.config.gateway import GatewayConfig
from cluster.config.load import load_config, parse_camera
from cluster.config.memory import MemoryConfig
from cluster.config.model import ModelConfig
from cluster.config.problems import InvalidConfigError, Problem
from cluster.config.pruning import PruningConfig
from cluster.config.question import QuestionConfig
from cluster.config.resolve import camera_settings, deep_merge
from cluster.config.root import SightlineConfig
from cluster.config.sampling import SamplingConfig
from cluster.config.schema import schema
from cluster.config.source import BackoffConfig, SourceConfig
from cluster.config.tiers import TiersConfig
from cluster.config.window import WindowConfig

__all__ = [
    "AskingConfig",
    "BackoffConfig",
    "CameraConfig",
    "CameraEntry",
    "ClusterConfig",
    "GatewayConfig",
    "InvalidConfigError",
    "MemoryConfig",
    "ModelConfig",
    "Problem",
    "PruningConfig",
    "QuestionConfig",
    "SamplingConfig",
    "SightlineConfig",
    "SourceConfig",
    "TiersConfig",
    "WindowConfig",
    "camera_settings",
    "deep_merge",
    "load_config",
    "parse_camera",
    "schema",
]
