"""Configuration: one closed pydantic model per concern; global sections that each camera may override.

``load_config`` reads a file, ``camera_settings`` resolves one camera.
"""

from cluster.config.camera import CameraConfig, CameraEntry, QuestionConfig
from cluster.config.cluster import ClusterConfig
from cluster.config.load import load_config, parse_camera
from cluster.config.memory import MemoryConfig
from cluster.config.problems import InvalidConfigError
from cluster.config.root import SightlineConfig, camera_settings, deep_merge

__all__ = [
    "CameraConfig",
    "CameraEntry",
    "ClusterConfig",
    "InvalidConfigError",
    "MemoryConfig",
    "QuestionConfig",
    "SightlineConfig",
    "camera_settings",
    "deep_merge",
    "load_config",
    "parse_camera",
]
