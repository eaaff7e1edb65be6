"""Tooltips of a chart's marks, as reports set them."""

import json

from matplotlib.artist import Artist


def get_tooltips(artist: Artist) -> list[str]:
    """Inverse of ``set_tooltips``."""
    return list(json.loads(artist.get_gid() or "[]"))
