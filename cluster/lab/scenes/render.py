"""Renders a scene at any instant and size; pictures and ground truth share the actors' positions."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cluster.lab.scenes.actors import COLORS, Actor, ActorState
from cluster.lab.scenes.backdrop import Foreground, paint_backdrop, paint_fence, paint_foreground
from cluster.lab.scenes.layouts import ASPECT
from cluster.lab.scenes.scene import Scene, Sensor
from cluster.lab.scenes.sprites import STEPS, Pose, Sprite, bag_sprite, person_sprite, vehicle_sprite
from cluster.lab.scenes.textures import Float

_Part = tuple[slice, slice]

_STRIDE = 0.85
_FALL_S = 0.6


@dataclass(frozen=True, slots=True)
class SceneObject:
    """A visible object: ``box`` (left, top, right, bottom) and ``velocity`` (per second) in shares of the picture."""

    id: int
    kind: str
    state: str
    box: tuple[float, float, float, float]
    velocity: tuple[float, float]
    colour: str


class SceneRenderer:
    """Frames and objects of one scene at one size in pixels."""

    def __init__(self, scene: Scene, width: int, height: int) -> None:
        self.scene, self.width, self.height = scene, width, height
        self._backdrop = paint_backdrop(scene.layout, width, height)
        self._foreground = paint_foreground(scene.layout, width, height, tree=scene.tree, pole=scene.pole)
        self._fence = paint_fence(scene.layout, width, height)
        self._sensor = Sensor(scene.conditions, width, height, scene.seed)
        self._lit = scene.light != "day"

    def picture(self, second: float, number: int) -> npt.NDArray[np.uint8]:
        """``[height, width, 3]`` uint8 at ``second``; ``number`` of the frame seeds noise and flicker."""
        picture = self._backdrop.copy()
        placed = [(place, actor) for actor in self.scene.actors if (place := actor.state_at(second)) is not None]
        fenced = self._fence is None
        for place, actor in sorted(placed, key=lambda pair: (pair[0].y, pair[1].kind != "bag")):
            if not fenced and place.y > self.scene.layout.zone.y1:
                self._overlay(picture, self._fence, 0)
                fenced = True
            sprite, left, top = self._pose(actor, place, second)
            if place.lift < 0.05:
                self._shadow(picture, sprite, left, top)
            self._paste(picture, sprite, left, top, actor.contrast)
        if not fenced:
            self._overlay(picture, self._fence, 0)
        for piece in self._foreground:
            sway = round(0.012 * self.height * math.sin(1.9 * second) + 0.006 * self.height * math.sin(5.3 * second))
            self._overlay(picture, piece, sway if piece.sways else 0)
        return self._sensor.expose(picture, second, number)

    def objects(self, second: float) -> list[SceneObject]:
        """Objects in the picture at ``second``, boxes clipped to it, occluded or not."""
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
                found.append(SceneObject(actor.id, actor.kind, place.state, box, velocity, actor.color))
        return found

    def _pose(self, actor: Actor, place: ActorState, second: float) -> tuple[Sprite, int, int]:
        """The actor's sprite and its top left corner in the picture."""
        size = self.scene.layout.person_height(place.y) * actor.scale * self.height
        # In steps of 4 %: few distinct sprites to cache.
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

    def _paste(self, picture: Float, sprite: Sprite, left: int, top: int, contrast: float) -> None:
        cut = self._cut(sprite.alpha.shape, left, top)
        if cut is None:
            return
        there, here = cut
        under = picture[there]
        under += (sprite.rgb[here] - under) * (sprite.alpha[here] * contrast)

    def _overlay(self, picture: Float, piece: Foreground | None, shift: int) -> None:
        if piece is None:
            return
        cut = self._cut(piece.alpha.shape, piece.left + shift, piece.top)
        if cut is not None:
            there, here = cut
            under = picture[there]
            under += (piece.rgb[here] - under) * piece.alpha[here]

    def _shadow(self, picture: Float, sprite: Sprite, left: int, top: int) -> None:
        """A soft dark ellipse under the figure."""
        half = max(2, (sprite.box[2] - sprite.box[0]) // 2)
        flat = max(1, half // 5)
        x, y = left + (sprite.box[0] + sprite.box[2]) // 2, top + sprite.foot[1]
        mask = _ellipse(half, flat)
        cut = self._cut(mask.shape, x - half, y - flat)
        if cut is not None:
            there, here = cut
            picture[there] *= 1.0 - 0.4 * mask[here]

    def _cut(self, shape: tuple[int, ...], left: int, top: int) -> tuple[_Part, _Part] | None:
        """Overlap of a sprite with the picture: slices of the picture, slices of the sprite."""
        y0, y1 = max(0, top), min(self.height, top + shape[0])
        x0, x1 = max(0, left), min(self.width, left + shape[1])
        if y0 >= y1 or x0 >= x1:
            return None
        return (slice(y0, y1), slice(x0, x1)), (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))


@lru_cache(maxsize=512)
def _ellipse(half: int, flat: int) -> Float:
    y = np.linspace(-1, 1, 2 * flat + 1, dtype=np.float32)[:, None]
    x = np.linspace(-1, 1, 2 * half + 1, dtype=np.float32)[None, :]
    return np.clip(1.6 * (1 - np.hypot(x, y)), 0, 1)[..., None].astype(np.float32)


def _person_pose(actor: Actor, place: ActorState, second: float, height: float) -> tuple[Pose, float]:
    """Pose of a person at an instant, and its horizontal offset from the path (picture heights)."""
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
            # Standing people move an arm now and then.
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
