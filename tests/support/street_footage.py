"""One street clip of every kind."""

from cluster.lab.scenes.street_clips import CLIP_KINDS, make_clip


def make_all_clips(folder, **settings):
    """``folder/<kind>.mp4`` of every kind, each with a seed of its own: kind -> path."""
    paths = {kind: folder / f"{kind}.mp4" for kind in CLIP_KINDS}
    for seed, (kind, path) in enumerate(paths.items()):
        make_clip(kind, path, seed=seed, **settings)
    return paths
