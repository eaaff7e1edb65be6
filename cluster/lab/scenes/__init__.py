"""Synthetic CCTV with ground truth: scenes are scripted, rendered at any size, and encoded as a camera would.

``make_scene`` scripts a scene, ``SceneRenderer`` draws it, ``window_label`` and ``memory_questions`` derive its ground
truth.
"""

from cluster.lab.scenes.actors import Scene
from cluster.lab.scenes.questions import memory_questions, phrasings, standing_question
from cluster.lab.scenes.render import SceneObject, SceneRenderer
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SPLITS, SceneEvent, window_label

__all__ = [
    "EVENT_KINDS",
    "SPLITS",
    "Scene",
    "SceneEvent",
    "SceneObject",
    "SceneRenderer",
    "make_scene",
    "memory_questions",
    "phrasings",
    "standing_question",
    "window_label",
]
