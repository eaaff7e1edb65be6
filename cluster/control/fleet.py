"""Fleet scheduler of the controller and the simulator: combines placement, demand, ladder and admission.

Plain state changed by calls. Time is the argument ``now_s``; one before the last counts as the last. A tick only
looks at replicas that changed.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

from cluster.control.admission import Admission, Commitments, MemoryDemand, PoolCapacity, expected_lag_s
from cluster.control.camera_record import CameraMove, CameraPlan, FleetCamera, Loads
from cluster.control.costs import CostModel
from cluster.control.demand import NOTICED, STEP_WINDOWS, Demand, DemandEstimate, Measured, declared_load, holding
from cluster.control.ladder import Ladder, LadderPolicy, Step
from cluster.control.placement import Placement
from cluster.control.replica_load import ReplicaLoad
from cluster.errors import UnknownCameraError
from cluster.types.cameras import Priority


class Fleet:
    """See the module. Methods raise ``UnknownCameraError`` if the camera is not in the fleet.

    Args:
        costs: of the model on the replicas' device.
        settle_s: seconds between steps down on one replica, so that each takes effect.
        timed: whether ``costs`` were measured on such replicas; if not, no camera is refused for lack of time.
    """

    def __init__(
        self,
        costs: CostModel,
        ladder: Ladder,
        *,
        policy: LadderPolicy | None = None,
        settle_s: float = 4.0,
        max_batch: int = STEP_WINDOWS,
        timed: bool = True,
    ) -> None:
        self.costs = costs
        self.ladder = ladder
        self.policy = LadderPolicy(ladder) if policy is None else policy
        self._settle_s = settle_s
        self._max_batch = max_batch
        self._placement = Placement()
        self._committed = Commitments(ladder, timed=timed)
        self._cameras: dict[str, FleetCamera] = {}
        self._replicas: dict[str, ReplicaLoad] = {}
        self._dirty: set[str] = set()
        self._pool = PoolCapacity(0.0, MemoryDemand(), None)
        self._now_s = -math.inf

    @property
    def replicas(self) -> list[str]:
        return sorted(self._replicas)

    @property
    def cameras(self) -> list[str]:
        return sorted(self._cameras)

    # -- cameras ---------------------------------------------------------------------------------
    def refusal(self, demand: Demand, now_s: float) -> Admission | None:
        """Why :meth:`admit` would refuse a new camera; None if it would not."""
        self._clock(now_s)
        return self._refusal(self._new(demand))

    def _refusal(self, camera: FleetCamera) -> Admission | None:
        # Only replicas that lower cameras have no time to spare, and are known to be slower than predicted.
        full = (each for name, each in self._replicas.items() if not each.draining and self.counts_on(name)[1])
        slow = sum(1 - 1 / max(1.0, each.ratio) for each in full)
        pool = replace(self._pool, seconds=self._pool.seconds - self.policy.high * slow)
        return self._committed.refusal(camera.priority, camera.needed, camera.held, pool)

    def _new(self, demand: Demand, *, idle: bool = False) -> FleetCamera:
        return FleetCamera(
            demand.priority,
            (),
            since_s=self._now_s,
            estimate=DemandEstimate(demand),
            unit=self._unit(demand),
            unit_demand=demand,
            held=holding(demand, self.ladder.rungs[0]),
            idle=idle,
        )

    def admit(
        self, demand: Demand, now_s: float, *, force: bool = False, prefer: str | None = None, idle: bool = False
    ) -> Admission:
        """Admit a camera if the fleet can answer it with every camera at its lowest permitted rung; a known one gets a
        new demand and keeps its place.

        Args:
            force: never refuse, as for cameras of a configuration.
            prefer: replica that already has it, as a restarted controller learns from its replicas.
            idle: it sends nothing yet, and is no load until :meth:`set_connected`. Capacity is reserved nevertheless:
                when all admitted cameras send, each can be answered at its lowest rung.
        """
        self._clock(now_s)
        if demand.camera in self._cameras:
            self.set_demand(demand.camera, demand)
            return self._admission_of(self._cameras[demand.camera])
        camera = self._new(demand, idle=idle)
        if not force and (refused := self._refusal(camera)) is not None:
            return refused
        if demand.priority is not Priority.CRITICAL and self._pool.seconds:
            camera.rung = self._committed.fitting(camera.needed, self._pool)
        if camera.rung > 0:
            camera.why = "the fleet was full when it was added"
        self._cameras[demand.camera] = camera
        self._committed.add(camera.priority, camera.needed)
        self._committed.hold(camera.held)
        weight = self._pool.largest_share_s(camera.needed[0], camera.held)
        self._own(demand.camera, self._placement.add(demand.camera, weight=weight, prefer=prefer))
        return self._admission_of(camera)

    def remove(self, name: str) -> list[CameraMove]:
        """Remove a camera; others may move as the mean load falls."""
        camera = self._known(name)
        self._own(name, None)
        self._committed.add(camera.priority, camera.needed, -1.0)
        self._committed.hold(camera.held, -1.0)
        del self._cameras[name]
        return self._moved(self._placement.remove(name), warm=True)

    def set_demand(self, name: str, demand: Demand) -> None:
        """Replace a camera's demand and drop its measurements; the same demand again changes nothing. A camera moved to
        a more urgent class is back at full quality, for which others give way."""
        camera = self._known(name)
        if demand == camera.estimate.declared:
            return
        camera.estimate = DemandEstimate(demand)
        if demand.priority.rank < camera.priority.rank:
            camera.rung, camera.since_s = 0, self._now_s
        self._reload(name, camera, always=True)

    def set_connected(self, name: str) -> None:
        """Count a camera as load, now that its first video has arrived."""
        camera = self._known(name)
        if camera.idle:
            camera.idle = False
            self._reload(name, camera, always=True)

    def observe_activity(self, name: str, changed: float) -> None:
        """Update a camera's demand from its pictures (:meth:`DemandEstimate.observe_activity`)."""
        camera = self._known(name)
        if camera.estimate.observe_activity(changed):
            self._reload(name, camera)

    def observe_counts(self, name: str, counts: Measured, rung: int | None = None) -> None:
        """Update a camera's demand from counts since the last call; once per window or heartbeat.

        ``rung``: where they were counted; None: the camera's own.
        """
        camera = self._known(name)
        if camera.estimate.observe_counts(counts, self.ladder.rungs[camera.rung if rung is None else rung]):
            self._reload(name, camera)

    def windows_per_s(self, name: str) -> float:
        """A camera's windows per second at its rung, gated ones included."""
        camera = self._known(name)
        return camera.windows_per_s(self.ladder.rungs[camera.rung])

    def plan(self, name: str) -> CameraPlan:
        """The camera's current replica and rung, and the reason."""
        camera = self._known(name)
        return CameraPlan(name, camera.owner, self.ladder.rungs[camera.rung].name, camera.why)

    # -- replicas --------------------------------------------------------------------------------
    def join(
        self, replica: str, *, window_tokens: float = math.inf, waiting_bytes: float = math.inf
    ) -> list[CameraMove]:
        """Add a ready replica, or resume a drained one. ``window_tokens``, ``waiting_bytes``: memory it offers
        (:class:`~cluster.control.admission.MemoryDemand`)."""
        limit = MemoryDemand(window_tokens, waiting_bytes)
        self._replicas.setdefault(replica, ReplicaLoad(limit)).draining = False
        self._count_capacity()
        return self._moved(self._placement.join(replica), warm=True)

    def leave(self, replica: str) -> list[CameraMove]:
        """Remove a replica; its cameras' state is lost unless it was drained before."""
        if replica not in self._replicas:
            return []
        moves = self._moved(self._placement.leave(replica), warm=False)
        del self._replicas[replica]
        for name, other in self._replicas.items():
            other.draining = self._placement.is_draining(name)
        self._count_capacity()
        self._dirty.discard(replica)
        return moves

    def drain(self, replica: str) -> list[CameraMove]:
        """Move all cameras off a replica until it joins again; the only replica keeps its cameras."""
        if replica not in self._replicas:
            return []
        self._replicas[replica].draining = self._placement.can_drain(replica)
        self._count_capacity()
        return self._moved(self._placement.drain(replica), warm=True)

    def draining(self, replica: str) -> bool:
        return self._replicas[replica].draining

    def replica_report(
        self,
        replica: str,
        *,
        busy_share: float,
        backlog_s: float,
        now_s: float,
        steps: int = 0,
        windows: int = 0,
    ) -> None:
        """Record a replica's report; unknown ones are ignored.

        Args:
            busy_share: fraction, 0 to 1, of the time since its last report that was spent on windows.
            backlog_s: seconds of waiting work.
            steps: engine steps since its last report, in which ``windows`` were computed.
        """
        self._clock(now_s)
        known = self._replicas.get(replica)
        if known is not None:
            unshared_s = max(0.0, steps - windows / self._max_batch) * self.costs.step_s
            known.report(busy_share, max(0.0, backlog_s), self._now_s, unshared_s=unshared_s, settle_s=self._settle_s)
            self._dirty.add(replica)

    def counts_on(self, replica: str) -> tuple[int, int]:
        """Numbers of its cameras, and of those below full quality."""
        cameras = self._replicas[replica].cameras
        return len(cameras), sum(camera.rung > 0 for camera in cameras.values())

    def utilisation(self, replica: str) -> float:
        """Load / capacity, with the backlog; 1 is full."""
        return self._replicas[replica].utilisation

    def lag_s(self, replica: str) -> float:
        """Expected mean lag of a replica's windows, seconds."""
        known = self._replicas[replica]
        if known.lag_s is None:
            sending = [camera for camera in known.cameras.values() if not camera.idle]
            due = [camera.windows_per_s(self.ladder.rungs[camera.rung]) for camera in sending]
            windows = sum(each * camera.estimate.busy for each, camera in zip(due, sending, strict=True))
            busy = windows / sum(due) if windows > 0 else 1.0
            known.lag_s = expected_lag_s(
                load=known.predicted, windows_per_s=windows, busy=busy, costs=self.costs, max_batch=self._max_batch
            )
        return known.lag_s

    def tick(self, now_s: float) -> list[Step]:
        """Take the ladder steps that are due now; touches only replicas that changed."""
        self._clock(now_s)
        steps: list[Step] = []
        for name in sorted(self._dirty):
            steps += self._step_ladder(name, self._replicas[name])
        return steps

    def _count_capacity(self) -> None:
        ready = [each for each in self._replicas.values() if not each.draining]
        pool_s = self.policy.high * len(ready)
        replica_s = self.policy.high if ready else None
        self._pool = PoolCapacity(
            pool_s, reduce(MemoryDemand.plus, (each.limit for each in ready), MemoryDemand()), replica_s
        )
        for name, camera in self._cameras.items():
            self._weigh(name, camera)

    def _weigh(self, name: str, camera: FleetCamera) -> None:
        self._placement.set_weight(name, self._pool.largest_share_s(camera.needed[0], camera.held))

    def _clock(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)

    def _step_ladder(self, name: str, replica: ReplicaLoad) -> list[Step]:
        """Take one replica's ladder steps; it stays marked as changed while it settles or cameras may climb."""
        utilisation = replica.utilisation
        settling = self._now_s < replica.settled_s
        over = utilisation > self.policy.high
        may_climb = not over and any(camera.rung for camera in replica.cameras.values())
        steps: list[Step] = []
        if (over and not settling) or may_climb:
            steps = self.policy.decide(replica.cameras, utilisation, self._now_s, scale=replica.ratio)
            if over:
                replica.settled_s = self._now_s + self._settle_s
            for step in steps:
                camera = self._cameras[step.camera]
                camera.rung, camera.since_s, camera.why = step.rung_to, step.at_s, step.reason
            replica.changed()
        if not (settling or steps or (may_climb and utilisation < self.policy.low)):
            self._dirty.discard(name)
        return steps

    def _unit(self, demand: Demand) -> Loads:
        return tuple(declared_load(demand, rung, self.costs, batch=self._max_batch) for rung in self.ladder.rungs)

    def _reload(self, name: str, camera: FleetCamera, *, always: bool = False) -> None:
        """Apply a changed demand, if the change is large enough."""
        estimate = camera.estimate
        if always or estimate.differs(camera.unit_demand):
            camera.unit_demand = estimate.demand
            camera.unit = self._unit(camera.unit_demand)
            before, camera.held = camera.held, holding(estimate.demand, self.ladder.rungs[0])
            self._committed.hold(before, -1.0)
            self._committed.hold(camera.held)
        old = camera.needed[0]
        if not always and abs(camera.unit[0] * estimate.factor - old) <= NOTICED * old:
            return
        self._committed.add(camera.priority, camera.needed, -1.0)
        camera.use_estimate()
        self._committed.add(camera.priority, camera.needed)
        self._changed(camera.owner)
        self._weigh(name, camera)

    def _own(self, name: str, owner: str | None) -> str | None:
        """Assign a camera to a replica, or to none; returns its former replica."""
        camera = self._cameras[name]
        before, camera.owner = camera.owner, owner
        if before is not None:
            del self._replicas[before].cameras[name]
            self._changed(before)
        if owner is not None:
            self._replicas[owner].add(name, camera)
            self._dirty.add(owner)
        return before

    def _changed(self, replica: str | None) -> None:
        if replica is not None:
            self._replicas[replica].changed()
            self._dirty.add(replica)

    def _moved(self, moved: Iterable[str], *, warm: bool) -> list[CameraMove]:
        moves = []
        for name in moved:
            owner = self._placement.owner(name)
            source = self._own(name, owner)
            moves.append(CameraMove(name, source, owner, warm and source is not None))
        return moves

    def _admission_of(self, camera: FleetCamera) -> Admission:
        full = camera.owner is not None and (camera.rung > 0 or self.utilisation(camera.owner) > self.policy.high)
        return Admission("reduced" if full else "accepted")

    def _known(self, name: str) -> FleetCamera:
        try:
            return self._cameras[name]
        except KeyError:
            raise UnknownCameraError(f"there is no camera {name!r} in the fleet") from None
