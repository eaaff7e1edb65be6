"""Renders a scene at any time and size; pictures and ground truth derive from the same actor positions.

The backdrop consists of facade, ground, road with markings and marked zone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from cluster.lab.scenes.actors import COLORS, Actor, ActorState, Conditions, Scene
from cluster.lab.scenes.layouts import ASPECT, Layout
from cluster.lab.scenes.sprites import STEPS, Pose, Sprite, bag_sprite, person_sprite, vehicle_sprite
from cluster.lab.scenes.textures import Float, clouds, texture
from cluster.lab.scenes.vocabulary import LANES, SceneEvent

_Part = tuple[slice, slice]

_STRIDE = 0.85
_FALL_S = 0.6


@dataclass(frozen=True, slots=True)
class SceneObject:
    """An object in the picture: ``box`` (left, top, right, bottom) and ``velocity`` (per second) in shares of the
    picture; ``lane``: of a vehicle on the road, else empty."""

    id: int
    kind: str
    state: str
    box: tuple[float, float, float, float]
    velocity: tuple[float, float]
    colour: str
    lane: str = ""


@dataclass(frozen=True, slots=True)
class Foreground:
    """A static object in front of the backdrop: ``rgb [h, w, 3]``, ``alpha [h, w, 1]``, top left corner in pixels."""

    rgb: Float
    alpha: Float
    left: int
    top: int
    sways: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    """An image and its top left corner in pixels; ``actor``: whom it shows, ``lifted`` off the ground."""

    image: Sprite | Foreground
    left: int
    top: int
    actor: Actor | None = None
    lifted: bool = False


class Sensor:
    """Simulated sensor: gain, tint, rain, noise."""

    def __init__(self, conditions: Conditions, width: int, height: int, seed: int) -> None:
        self._conditions = conditions
        self._seed = seed
        rng = np.random.default_rng([seed, 5])
        self._shape = (height, width)
        pad = 48
        # A single noise field, shifted randomly for every frame, costs only an addition.
        noise = rng.normal(0.0, max(conditions.noise, 0.01), (height + pad, width + pad, 1)).astype(np.float32)
        if conditions.noise > 2.5:
            noise = noise + rng.normal(0.0, conditions.noise / 3, (height + pad, width + pad, 3)).astype(np.float32)
        self._noise = _rows_of_samples(noise)
        self._pad = pad
        self._rain = _rows_of_samples(self._streaks(rng)) if conditions.rain else None

    def _streaks(self, rng: np.random.Generator) -> Float:
        """Field of slanted bright lines, twice the frame's height, of which frames show random offsets."""
        height, width = self._shape
        field = np.zeros((2 * height, width), dtype=np.float32)
        length = max(4, height // 14)
        for _ in range(round(90 * self._conditions.rain)):
            top, left = int(rng.integers(0, 2 * height - length)), int(rng.integers(0, width - length // 4 - 1))
            steps = np.arange(length)
            field[top + steps, left + steps // 5] = rng.uniform(18, 40)
        return field[..., None]

    def expose(self, picture: Float, second: float, number: int) -> np.ndarray:
        """Convert ``picture`` (float32, in daylight) to the sensor's uint8 output. Modifies ``picture``."""
        conditions = self._conditions
        rng = np.random.default_rng([self._seed, 6, number])
        if conditions.monochrome:
            picture[...] = picture.mean(axis=-1, keepdims=True)
            tint: np.ndarray = np.ones(3, dtype=np.float32)
        else:
            tint = np.asarray(conditions.tint, dtype=np.float32)
        height, width = self._shape
        samples = picture.reshape(height, 3 * width)
        samples *= np.tile(tint * conditions.gain(second, number), width)
        if self._rain is not None:
            offset = int(rng.integers(0, height))
            samples += self._rain[offset : offset + height]
        dy, dx = rng.integers(0, self._pad, 2)
        samples += self._noise[dy : dy + height, 3 * dx : 3 * (dx + width)]
        np.clip(samples, 0, 255, out=samples)
        return picture.astype(np.uint8)


def _rows_of_samples(field: Float) -> Float:
    """``[height, width, 1 or 3]`` -> ``[height, 3 * width]``: numpy is several times slower with a last axis of 3."""
    height, width, _ = field.shape
    return np.ascontiguousarray(np.broadcast_to(field, (height, width, 3))).reshape(height, 3 * width)


class SceneRenderer:
    """Frames and objects of one scene at one size in pixels."""

    def __init__(self, scene: Scene, width: int, height: int) -> None:
        self.scene, self.width, self.height = scene, width, height
        self._foreground = paint_foreground(scene.layout, width, height, tree=scene.tree, pole=scene.pole)
        self._fence = paint_fence(scene.layout, width, height)
        self._lit = scene.light != "day"

    def picture(self, second: float, number: int) -> npt.NDArray[np.uint8]:
        """Frame ``[height, width, 3]`` uint8 at ``second``; its ``number`` seeds noise and flicker."""
        picture = self._backdrop.copy()
        for layer in self._layers(second):
            if layer.actor is None:
                self._blend(picture, layer)
                continue
            if not layer.lifted:
                self._shadow(picture, layer)
            self._blend(picture, layer, layer.actor.contrast)
        return self._sensor.expose(picture, second, number)

    def seen_share(self, ids: frozenset[int], second: float) -> float | None:
        """Share of the actors' pixels in the picture that is not occluded; None if they are not in the picture."""
        visible = np.zeros((self.height, self.width), bool)
        own = np.zeros_like(visible)
        for layer in self._layers(second):
            cut = self._cut(layer.image.alpha.shape, layer.left, layer.top)
            if cut is not None:
                there, here = cut
                solid = layer.image.alpha[here][..., 0] > 0.5
                mine = layer.actor is not None and layer.actor.id in ids
                visible[there][solid] = mine
                if mine:
                    own[there] |= solid
        return float(visible.sum() / own.sum()) if own.any() else None

    @cached_property
    def _backdrop(self) -> Float:
        return paint_backdrop(self.scene.layout, self.width, self.height)

    @cached_property
    def _sensor(self) -> Sensor:
        return Sensor(self.scene.conditions, self.width, self.height, self.scene.seed)

    def _layers(self, second: float) -> Iterator[_Layer]:
        """Layers to draw over the backdrop, from back to front."""
        placed = [(place, actor) for actor in self.scene.actors if (place := actor.state_at(second)) is not None]
        fence = self._fence
        for place, actor in sorted(placed, key=lambda pair: (pair[0].y, pair[1].kind != "bag")):
            if fence is not None and place.y > self.scene.layout.zone.y1:
                yield _Layer(fence, fence.left, fence.top)
                fence = None
            yield _Layer(*self._pose(actor, place, second), actor, lifted=place.lift >= 0.05)
        if fence is not None:
            yield _Layer(fence, fence.left, fence.top)
        for piece in self._foreground:
            sway = round(0.012 * self.height * math.sin(1.9 * second) + 0.006 * self.height * math.sin(5.3 * second))
            yield _Layer(piece, piece.left + (sway if piece.sways else 0), piece.top)

    def objects(self, second: float) -> list[SceneObject]:
        """Objects in the picture at ``second``, occluded or not, with boxes clipped to it."""
        found = []
        for actor in self.scene.actors:
            place = actor.state_at(second)
            if place is None:
                continue
            sprite, left, top = self._pose(actor, place, second)
            box = (
                max(0, left + sprite.box[0]) / self.width,
                max(0, top + sprite.box[1]) / self.height,
                min(self.width, left + sprite.box[2]) / self.width,
                min(self.height, top + sprite.box[3]) / self.height,
            )
            if box[0] < box[2] and box[1] < box[3]:
                velocity = (place.vx / ASPECT, place.vy)
                lane = ""
                if actor.kind == "vehicle" and place.state != "parked":
                    lane = LANES[place.y > self.scene.layout.middle(place.x)]
                found.append(SceneObject(actor.id, actor.kind, place.state, box, velocity, actor.color, lane))
        return found

    def _pose(self, actor: Actor, place: ActorState, second: float) -> tuple[Sprite, int, int]:
        """The actor's sprite and its top left corner, in pixels of the picture."""
        size = self.scene.layout.person_height(place.y) * actor.scale * self.height
        # Sizes in steps of 4 %, to cache few distinct sprites.
        pixels = 1.04 ** round(math.log(max(size, 6.0), 1.04))
        color, direction = COLORS[actor.color], actor.direction(second)
        shift_x = 0.0
        if actor.kind == "person":
            pose, shift_x = _person_pose(actor, place, second, size / self.height)
            sprite = person_sprite(color, actor.seed, pixels, pose, direction)
        elif actor.kind == "vehicle":
            turn = int(actor.distance_travelled(second) * self.height / max(pixels, 1) * 8) % 8
            sprite = vehicle_sprite(color, actor.form, pixels, direction, turn, self._lit)
        else:
            sprite = bag_sprite(color, actor.form, pixels)
        x = (place.x + shift_x) / ASPECT * self.width
        y = place.y * self.height - place.lift * size
        return sprite, round(x) - sprite.foot[0], round(y) - sprite.foot[1]

    def _blend(self, picture: Float, layer: _Layer, contrast: float = 1.0) -> None:
        image = layer.image
        cut = self._cut(image.alpha.shape, layer.left, layer.top)
        if cut is not None:
            there, here = cut
            under = picture[there]
            under += (image.rgb[here] - under) * (image.alpha[here] * contrast)

    def _shadow(self, picture: Float, layer: _Layer) -> None:
        """A soft dark ellipse under the figure."""
        sprite, left, top = layer.image, layer.left, layer.top
        assert isinstance(sprite, Sprite)
        half = max(2, (sprite.box[2] - sprite.box[0]) // 2)
        flat = max(1, half // 5)
        x, y = left + (sprite.box[0] + sprite.box[2]) // 2, top + sprite.foot[1]
        mask = _ellipse(half, flat)
        cut = self._cut(mask.shape, x - half, y - flat)
        if cut is not None:
            there, here = cut
            picture[there] *= 1.0 - 0.4 * mask[here]

    def _cut(self, shape: tuple[int, ...], left: int, top: int) -> tuple[_Part, _Part] | None:
        """Overlap of a sprite with the picture, as slices of the picture and of the sprite; None without any."""
        y0, y1 = max(0, top), min(self.height, top + shape[0])
        x0, x1 = max(0, left), min(self.width, left + shape[1])
        if y0 >= y1 or x0 >= x1:
            return None
        return (slice(y0, y1), slice(x0, x1)), (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))


# Size at which the visibility of events is checked, and checks per second.
_CHECK_SIZE = (160, 90)
_CHECKS_PER_S = 2


def seen_share(scene: Scene, event: SceneEvent) -> float:
    """Share of the event's instants at which at least half of the pixels of its actors (of a left object: the object)
    are not occluded; instants with none of them in the picture are ignored."""
    renderer = SceneRenderer(scene, *_CHECK_SIZE)
    ids = frozenset(event.actors[-1:] if event.kind == "left_object" else event.actors)
    times = np.arange(event.start_s, event.end_s, 1 / _CHECKS_PER_S)
    shares = [share for second in times if (share := renderer.seen_share(ids, float(second))) is not None]
    return sum(share >= 0.5 for share in shares) / max(1, len(shares))


@lru_cache(maxsize=512)
def _ellipse(half: int, flat: int) -> Float:
    y = np.linspace(-1, 1, 2 * flat + 1, dtype=np.float32)[:, None]
    x = np.linspace(-1, 1, 2 * half + 1, dtype=np.float32)[None, :]
    return np.clip(1.6 * (1 - np.hypot(x, y)), 0, 1)[..., None].astype(np.float32)


def _person_pose(actor: Actor, place: ActorState, second: float, height: float) -> tuple[Pose, float]:
    """Pose of a person at an instant, and its horizontal offset from the path, in picture heights."""
    bag = actor.carries is not None and actor.carries[0] <= second < actor.carries[1]
    match place.state:
        case "walking" | "running":
            stride = _STRIDE * (1.5 if place.state == "running" else 1.0) * max(height, 1e-3)
            step = int(actor.distance_travelled(second) / stride * STEPS) % STEPS
            return Pose(step=step, lean=10 if place.state == "running" else 0, bag=bag), 0.0
        case "lying":
            share = min(1.0, place.since_s / _FALL_S)
            return Pose(step=-1, lean=5 * round(18 * share**1.5), arms=(60, 20)), 0.0
        case "fighting":
            return _fighting(actor, second, height)
        case "crouching":
            share = min(1.0, place.since_s / 0.4)
            return Pose(crouch=round(share, 1), arms=(30, 20), bag=bag), 0.0
        case "sitting":
            return Pose(sit=True, arms=(30, 20)), 0.0
        case "climbing":
            return Pose(step=int(second * 10) % STEPS, arms=(160, 140), lean=15), 0.0
        case _:
            # Standing people move an arm occasionally.
            wave = math.sin(2 * math.pi * 0.25 * second + actor.seed)
            return Pose(arms=(10 * round(1 + 2 * max(0.0, wave)), -8), bag=bag), 0.0


def _fighting(actor: Actor, second: float, height: float) -> tuple[Pose, float]:
    """Fast punches and a swaying body."""
    beat = 2 * math.pi * (2.3 + 0.05 * (actor.seed % 10))
    phase = actor.seed % 7
    punch = math.sin(beat * second + phase)
    lean = 5 * round(3 + 4 * math.sin(0.6 * beat * second + phase))
    arms = (10 * round(6 + 7 * punch), 10 * round(6 - 7 * punch))
    shift = 0.16 * height * math.sin(0.45 * beat * second + 2 * phase)
    step = int(second * 14 + phase) % STEPS if abs(punch) > 0.5 else -1
    return Pose(step=step, lean=lean, arms=arms), shift


def paint_backdrop(layout: Layout, width: int, height: int) -> Float:
    """Backdrop in daylight, ``[height, width, 3]`` float32 in 0..255."""
    rng = np.random.default_rng([layout.seed, 7])
    y = ((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None]
    x = ((np.arange(width, dtype=np.float32) + 0.5) / width * ASPECT)[None, :]
    road, ground, facade = (texture(name, height, width, layout.seed) for name in layout.textures)
    picture = np.where((y < layout.horizon)[..., None], facade, ground)
    _windows(picture, layout, x, y, rng)
    middle = layout.road + layout.slope * (x - ASPECT / 2)
    half = layout.lane + layout.median / 2
    on_road = (np.abs(y - middle) < half) & (y > layout.horizon)
    picture = np.where(on_road[..., None], road, picture)
    kerb = (np.abs(np.abs(y - middle) - half) < 0.008) & (y > layout.horizon)
    picture[kerb] = (186, 182, 174)
    _markings(picture, layout, x, y, middle)
    _zone(picture, layout, x, y)
    picture *= (1.0 - 0.16 * (((x / ASPECT - 0.5) / 0.7) ** 2 + ((y - 0.5) / 0.7) ** 2))[..., None]
    return picture.astype(np.float32)


def _windows(picture: Float, layout: Layout, x: Float, y: Float, rng: np.random.Generator) -> None:
    pitch, top = float(rng.uniform(0.16, 0.3)), float(rng.uniform(0.02, 0.06))
    bottom = layout.horizon * float(rng.uniform(0.6, 0.75))
    share = x / pitch % 1
    glass = (share > 0.2) & (share < 0.7) & (y > top) & (y < bottom)
    frame = (share > 0.16) & (share < 0.74) & (y > top - 0.01) & (y < bottom + 0.012)
    picture[frame & ~glass] = rng.uniform(150, 215)
    shine = 60 + 40 * ((x / pitch + 2 * y) % 1)
    picture[glass] = (shine + 0 * y)[glass][:, None] * np.array((0.8, 0.95, 1.1), dtype=np.float32)


def _markings(picture: Float, layout: Layout, x: Float, y: Float, middle: Float) -> None:
    white = np.array((222, 220, 208), dtype=np.float32)
    if layout.median > 0:
        strip = np.abs(y - middle) < layout.median / 2
        picture[strip & (y > layout.horizon)] = (112, 128, 84)
    else:
        dashes = (np.abs(y - middle) < 0.007) & (x / 0.2 % 1 < 0.55)
        picture[dashes] = white
    # An arrow on each lane.
    for near, sign in ((True, 1.0), (False, -1.0)):
        centre = middle + (0.5 * layout.lane + layout.median / 2) * (1 if near else -1)
        for at in (0.45, 1.3):
            along, across = (x - at) * sign, np.abs(y - centre) / layout.lane
            shaft = (np.abs(along) < 0.09) & (across < 0.06)
            head = (along > 0.05) & (across < 0.2 * (1 - (along - 0.05) / 0.1))
            picture[shaft | head] = white


def _zone(picture: Float, layout: Layout, x: Float, y: Float) -> None:
    zone = layout.zone
    inside = (x >= zone.x0) & (x <= zone.x1) & (y >= zone.y0) & (y <= zone.y1)
    edge = inside & ~((x >= zone.x0 + 0.014) & (x <= zone.x1 - 0.014) & (y >= zone.y0 + 0.012) & (y <= zone.y1 - 0.012))
    stripes = inside & ((x + zone.tilt * y) / zone.pitch % 1 < zone.share)
    color = np.asarray(zone.color, dtype=np.float32)
    picture[stripes] = (1 - zone.opaque) * picture[stripes] + zone.opaque * color
    picture[edge] = color


def paint_foreground(layout: Layout, width: int, height: int, *, tree: bool, pole: bool) -> list[Foreground]:
    """A pole and a swaying treetop in an upper corner, as requested."""
    rng = np.random.default_rng([layout.seed, 11])
    found = []
    at, side = float(rng.uniform(0.25, 0.75)), bool(rng.random() < 0.5)
    if pole:
        thick = max(2, round(0.02 * height))
        tone = np.linspace(60, 104, thick, dtype=np.float32)[None, :, None]
        rows = round(0.8 * height)
        rgb = np.broadcast_to(tone, (rows, thick, 3)).astype(np.float32)
        found.append(Foreground(rgb, np.ones((rows, thick, 1), np.float32), round(at * width), 0, False))
    if tree:
        rows, cols = round(0.42 * height), round(0.5 * height)
        y = np.linspace(0, 1, rows, dtype=np.float32)[:, None]
        x = np.linspace(0, 1, cols, dtype=np.float32)[None, :]
        x = x if side else 1 - x
        crown = 1.0 - np.hypot(x / 0.9, y / 0.9) + 0.16 * clouds(rng, rows, cols, 7)
        alpha = np.clip(crown * 14, 0, 1)[..., None].astype(np.float32)
        shade = 10 * clouds(rng, rows, cols, 9) + 9 * clouds(rng, rows, cols, 24)
        leaves = np.array((62, 92, 48), dtype=np.float32) + shade[..., None]
        found.append(Foreground(leaves.astype(np.float32), alpha, 0 if side else width - cols, 0, True))
    return found


def paint_fence(layout: Layout, width: int, height: int) -> Foreground | None:
    """The railing along the zone's front edge; None if the zone has none."""
    zone = layout.zone
    if not zone.fence:
        return None
    tall = 0.3 * layout.person_height(zone.y1)
    top, rows = round((zone.y1 - tall) * height), max(4, round(tall * height))
    left, cols = round(zone.x0 / ASPECT * width), max(8, round((zone.x1 - zone.x0) / ASPECT * width))
    y = np.linspace(0, 1, rows, dtype=np.float32)[:, None]
    x = (np.arange(cols, dtype=np.float32) / height)[None, :]
    rails = (np.abs(y - 0.1) < 0.09) | (np.abs(y - 0.55) < 0.07)
    posts = x / 0.1 % 1 < 0.14
    alpha = (rails | posts).astype(np.float32)[..., None]
    rgb = np.broadcast_to(np.array((196, 198, 200), dtype=np.float32), (rows, cols, 3)).copy()
    return Foreground(rgb, alpha, left, top, False)
