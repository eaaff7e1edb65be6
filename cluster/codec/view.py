"""What the codec processor keeps for pictures of one size."""

from collections.abc import Sequence

from cluster.codec.change import ChangeAccumulator
from cluster.codec.picture import PictureScaler
from cluster.codec.privacy import Polygon, PrivacyMasks, covered
from cluster.codec.zones import Outlines, outline_zones
from cluster.types import BoolGrid, PatchGeometry, PatchGrid


class PictureView:
    """State that depends on the picture size: grid, scaler, accumulated change, masks, outlines of zones."""

    def __init__(
        self, width: int, height: int, geometry: PatchGeometry, masks: PrivacyMasks, zones: Sequence[Polygon] = ()
    ) -> None:
        self.width, self.height = width, height
        self.grid: PatchGrid = geometry.grid(width, height)
        self.scaler = PictureScaler(self.grid)
        self.masked: BoolGrid | None = masks.raster(width, height) if masks else None
        self.hidden = None if self.masked is None else covered(self.masked, self.grid.rows, self.grid.cols)
        self.outlines: Outlines | None = outline_zones(zones, self.grid)
        self.change = ChangeAccumulator(width, height, self.grid, self.masked)
