"""Configuration: one closed pydantic model per concern; global sections that each camera may override.

``load_config`` reads a file, ``camera_settings`` resolves one camera, ``schema`` describes all of it.
"""

from cluster.config.camera import (
    BackoffConfig,
    CameraConfig,
    CameraEntry,
    PruningConfig,
    QuestionConfig,
    SamplingConfig,
    SourceConfig,
    WindowConfig,
)
from cluster.config.cluster import ClusterConfig, GatewayConfig
from cluster.config.load import load_config, parse_camera, schema
from cluster.config.memory import AskingConfig, MemoryConfig, TiersConfig
from cluster.config.model import ModelConfig
from cluster.config.problems import InvalidConfigError, Problem
from cluster.config.root import SightlineConfig, camera_settings, deep_merge

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
