"""The demo clips: CCTV-like scenes drawn and encoded on the spot, with the truth of what moves where."""

from cluster.lab.clips.make import CLIP_KINDS, ClipTruth, TrueObject, make_clip, make_demo_clips, truth_path

__all__ = ["CLIP_KINDS", "ClipTruth", "TrueObject", "make_clip", "make_demo_clips", "truth_path"]
