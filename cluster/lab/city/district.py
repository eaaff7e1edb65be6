"""The part of a city under one controller: its fleet, cameras and replicas, simulated tick by tick.

Replicas do not interact within a tick, so each simulates it independently. Reports and the controller's decisions take
effect at tick boundaries.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from cluster.control.camera_record import CameraMove
from cluster.control.costs import CostModel
from cluster.control.demand import stride_at
from cluster.control.fleet_settings import FleetSettings
from cluster.control.ladder import Step
from cluster.lab.city import Bools, Floats, Ints
from cluster.lab.city.cameras import Cameras, Due, Fate, UnreportedCounts
from cluster.lab.city.mix import BurstEffect, BurstPeriod, wakes
from cluster.lab.city.plan import WAKE_S, CityPlan, Event, What
from cluster.lab.city.replica import Arrival, Facts, Outcome, Replica, WorkTable
from cluster.lab.city.result import Admitted
from cluster.lab.city.tally import Lost, Tally

NO_OWNER = -1


class District:
    """One controller's simulation. After :meth:`run`, ``tally`` counts every window that ended; ``waiting`` of them are
    still pending.

    ``kinds``: class index in the mix per camera; ``replicas``, ``events`` and ``phases``: the district's share of the
    city's; ``admitted``: updated with the admission results.
    """

    def __init__(
        self,
        plan: CityPlan,
        kinds: Ints,
        *,
        replicas: int,
        costs: CostModel,
        seed: tuple[int, ...],
        events: Sequence[Event] = (),
        spells: Sequence[BurstPeriod] = (),
        phases: Sequence[float] | None = None,
        admitted: Admitted | None = None,
    ) -> None:
        timing, classes = plan.timing, plan.mix.classes
        self.plan, self._kinds, self._costs, self._seed = plan, kinds, costs, seed
        self._admitted = Admitted() if admitted is None else admitted
        self.names = [f"{classes[kind].name}-{index:05d}" for index, kind in enumerate(kinds)]
        self.cameras = Cameras(classes, kinds, hour=plan.hour, rng=np.random.default_rng([*seed, 1]))
        self._ladder = plan.ladder
        self._value = np.array([rung.value for rung in self._ladder.rungs])
        self._sheds = np.array([rung.shed for rung in self._ladder.rungs])
        bins = max(1, round(timing.seconds / timing.bin_s))
        self.tally = Tally(bins=bins, bin_s=timing.seconds / bins, rungs=len(self._ladder.rungs))
        self._index = {name: index for index, name in enumerate(self.names)}
        self._rng = np.random.default_rng([*seed, 0])
        self._demands = [each.demand(each.name, plan.mix.geometry, plan.hour) for each in classes]
        # Stride relative to full quality, by class and rung.
        self._strides = np.array(
            [[stride_at(each, rung) / each.stride_s for rung in self._ladder.rungs] for each in self._demands]
        )
        self._work = WorkTable(self._demands, self._ladder, costs, alike=plan.alike)
        self._ranks = np.array([each.priority.rank for each in classes])[kinds]
        mine = [classes[kind] for kind in kinds.tolist()]
        self._facts = Facts([each.priority for each in mine], [each.window_s for each in mine])
        self._spread = np.array([each.activity.spread for each in classes])[kinds]
        count = len(self.names)
        # A camera's first frame determines when its windows end.
        self._phases = self._rng.random(count).tolist() if phases is None else phases
        self._rung = np.zeros(count, dtype=np.int64)
        self._owner = np.full(count, NO_OWNER)
        self._refused = np.zeros(count, dtype=bool)
        self._unreported = UnreportedCounts(count)
        self._wakes: list[BurstEffect] = wakes(spells, kinds, self._rng)
        # Serving replicas by number, and drained ones that still finish their current step.
        self._replicas: dict[int, Replica] = {}
        self._leaving: list[Replica] = []
        self._dead: dict[int, float] = {}
        self._numbers = 0
        self._in_transit: dict[int, list[Arrival]] = {}
        self._silent_until_s = 0.0
        self._was_silent = False
        self._settings = FleetSettings(costs, self._ladder, max_batch=plan.engine.max_batch)
        self.fleet = self._settings.fleet()
        self._events = sorted(events, key=lambda event: event.at_s)
        for _ in range(replicas):
            self._join(self._new_replica(0.0))
        for camera in range(count):
            self._admit(camera)

    @property
    def waiting(self) -> int:
        """Windows that were neither answered nor dropped yet."""
        replicas = (*self._replicas.values(), *self._leaving)
        return sum(each.waiting for each in replicas) + sum(map(len, self._in_transit.values()))

    def run(self, on_share: Callable[[float], None] = lambda _: None) -> None:
        """Simulate from start to end; ``on_share`` is called from time to time with the fraction done."""
        timing = self.plan.timing
        ticks = max(1, round(timing.seconds / timing.tick_s))
        for tick in range(ticks):
            self._tick(tick * timing.seconds / ticks, (tick + 1) * timing.seconds / ticks)
            if tick % 16 == 0:
                on_share(tick / ticks)

    # -- the controller ----------------------------------------------------------------------------
    def _admit(self, camera: int) -> None:
        demand = replace(self._demands[self._kinds[camera]], camera=self.names[camera])
        admission = self.fleet.admit(demand, 0.0, force=self.plan.force)
        if admission.verdict == "refused":
            self._admitted.refused += 1
            self._admitted.missing_replicas += admission.missing_replicas / max(admission.missing_streams, 1e-9)
            self._refused[camera] = True
            self.cameras.start(camera, 0.0, self._phases[camera])
            return
        self._admitted.reduced += admission.verdict == "reduced"
        self._start_camera(camera, 0.0)

    def _join(self, replica: str) -> list[CameraMove]:
        held = self._costs.window_tokens
        return self.fleet.join(replica, window_tokens=math.inf if held is None else held)

    def _start_camera(self, camera: int, now_s: float) -> None:
        """Start a camera without any windows, with the owner and rung of its plan."""
        plan = self.fleet.plan(self.names[camera])
        self._rung[camera] = self._ladder.index_of(plan.rung)
        self._owner[camera] = NO_OWNER if plan.owner is None else _number(plan.owner)
        self.cameras.factor[camera] = self._strides[self._kinds[camera], self._rung[camera]]
        self.cameras.start(camera, now_s, self._phases[camera])
        self._unreported.reset_camera(camera, now_s)

    def _control(self, now_s: float) -> None:
        """Deliver reports to the fleet and apply its decisions."""
        if now_s < self._silent_until_s:
            return
        for number, since_s in list(self._dead.items()):
            if now_s - since_s >= self.plan.timing.detect_s:
                del self._dead[number]
                self._apply_moves(self.fleet.leave(_name(number)), now_s)
        for number, replica in self._replicas.items():
            self.fleet.replica_report(
                _name(number),
                busy_share=replica.busy_share,
                backlog_s=replica.backlog_s(now_s),
                steps=replica.steps,
                windows=replica.computed,
                now_s=now_s,
            )
        for camera, counts in self._unreported.due(now_s, self.plan.timing.report_s):
            if not self._refused[camera]:
                self.fleet.observe_counts(self.names[camera], counts)
        if steps := self.fleet.tick(now_s):
            self._apply_steps(steps, now_s)

    def _apply_steps(self, steps: Sequence[Step], now_s: float) -> None:
        """Apply steps on the quality ladder, at most one per camera."""
        camera = np.array([self._index[step.camera] for step in steps])
        to = np.array([step.rung_to for step in steps])
        was_shed = self._sheds[[step.rung_from for step in steps]]
        self.tally.steps[self._bin(now_s)] += len(steps)
        # Production replicas report every second, so that their counts hardly mix windows from before and after a step.
        for each, counts in self._unreported.pop_counts(camera, now_s):
            self.fleet.observe_counts(self.names[each], counts, int(self._rung[each]))
        self._rung[camera] = to
        self.cameras.stretch(camera[~was_shed], self._strides[self._kinds[camera], to][~was_shed])
        for back, rung in zip(camera[was_shed].tolist(), to[was_shed].tolist(), strict=True):
            # While shed, its frames were not kept.
            self.cameras.factor[back] = self._strides[self._kinds[back], rung]
            self.cameras.start(back, now_s, self._phases[back])

    def _apply_moves(self, moves: Iterable[CameraMove], now_s: float) -> None:
        for move in moves:
            camera = self._index[move.camera]
            source = int(self._owner[camera])
            self.tally.moves[self._bin(now_s)] += 1
            waiting = self._release(camera)
            if not move.warm or source not in self._replicas:
                self._drop_lost(waiting)
                self._start_camera(camera, now_s)
                continue
            self._owner[camera] = NO_OWNER if move.to is None else _number(move.to)
            if self._owner[camera] in self._replicas:
                self._in_transit.setdefault(int(self._owner[camera]), []).extend(waiting)
            else:
                self._drop_lost(waiting)

    def _release(self, camera: int) -> list[Arrival]:
        """Remove and return the camera's windows that wait at its replica or are being moved to it."""
        owner = int(self._owner[camera])
        if owner not in self._replicas:
            return []
        carried = self._in_transit.get(owner, [])
        if carried:
            self._in_transit[owner] = [arrival for arrival in carried if arrival.camera != camera]
        mine = [arrival for arrival in carried if arrival.camera == camera]
        return self._replicas[owner].release(self.names[camera]) + mine

    def _drop_lost(self, gone: Sequence[Arrival]) -> None:
        self._drop(gone, Lost.REPLICA_LOST)
        self._reencode_frames(gone)

    def _restart_controller(self, now_s: float) -> None:
        """Rebuild the fleet from the configuration and the cameras that live replicas report."""
        self.fleet = self._settings.fleet()
        self._dead.clear()
        for number in self._replicas:
            self._join(_name(number))
        for camera in np.flatnonzero(~self._refused).tolist():
            owner, name = int(self._owner[camera]), self.names[camera]
            held = owner in self._replicas
            demand = replace(self._demands[self._kinds[camera]], camera=name)
            self.fleet.admit(demand, now_s, force=True, prefer=_name(owner) if held else None)
            plan = self.fleet.plan(name)
            if not held or plan.owner != _name(owner) or self._sheds[self._rung[camera]]:
                self._drop_lost(self._release(camera))
                self._start_camera(camera, now_s)
            else:
                self._rung[camera] = self._ladder.index_of(plan.rung)
                self.cameras.stretch(camera, self._strides[self._kinds[camera], self._rung[camera]])
                self._unreported.reset_camera(camera, now_s)

    # -- events ------------------------------------------------------------------------------------
    def _apply_events(self, now_s: float, until_s: float) -> None:
        while self._events and self._events[0].at_s < until_s:
            event = self._events.pop(0)
            if event.what is What.DRAIN and now_s < self._silent_until_s:
                # Without a controller, cameras cannot be handed over.
                back_s = max(until_s, self._silent_until_s)
                insort(self._events, replace(event, at_s=back_s), key=lambda each: each.at_s)
                continue
            match event.what:
                case What.WAKE:
                    reached = self._rng.random(len(self.names)) < event.amount
                    self._wakes.append(BurstEffect(event.at_s, event.at_s + WAKE_S, reached))
                case What.CONTROLLER:
                    self._silent_until_s = now_s + event.amount
                case What.JOIN:
                    for _ in range(int(event.amount)):
                        name = self._new_replica(now_s)
                        if now_s >= self._silent_until_s:
                            self._apply_moves(self._join(name), now_s)
                case What.KILL | What.DRAIN:
                    numbers = sorted(self._replicas)
                    for place in sorted(self._rng.choice(len(numbers), int(event.amount), replace=False).tolist()):
                        self._remove_replica(numbers[place], now_s, dies=event.what is What.KILL)

    def _remove_replica(self, number: int, now_s: float, *, dies: bool) -> None:
        if dies:
            replica = self._replicas.pop(number)
            held = [self.names[camera] for camera in np.flatnonzero(self._owner == number).tolist()]
            self._drop_lost([*replica.die(held), *self._in_transit.pop(number, ())])
            self._dead[number] = now_s
            return
        # The last replica's cameras are left without an owner.
        self._apply_moves([*self.fleet.drain(_name(number)), *self.fleet.leave(_name(number))], now_s)
        self._leaving.append(self._replicas.pop(number))

    def _new_replica(self, now_s: float) -> str:
        number = self._numbers
        self._numbers += 1
        rng = np.random.default_rng([*self._seed, 2, number])
        self._replicas[number] = Replica(self._costs, self.plan.engine, self._facts, rng, now_s)
        return _name(number)

    # -- one tick ----------------------------------------------------------------------------------
    def _tick(self, now_s: float, until_s: float) -> None:
        self._apply_events(now_s, until_s)
        if self._was_silent and now_s >= self._silent_until_s:
            self._restart_controller(now_s)
        self._was_silent = now_s < self._silent_until_s
        self._control(now_s)
        due = self.cameras.due(until_s, [each for each in self._wakes if each.start_s < until_s and each.end_s > now_s])
        # A shortened stride may put a window's end in the past; it closes now (WindowClock.change_lengths).
        arrivals = self._close_windows(due._replace(end_s=np.maximum(due.end_s, now_s)))
        out, busy_s = Outcome(), 0.0
        for number, replica in self._replicas.items():
            mine = arrivals.get(number, [])
            if number in self._in_transit:
                mine = sorted(self._in_transit.pop(number), key=lambda arrival: arrival.arrived_s) + mine
            replica.run(mine, now_s, until_s, out)
            busy_s += replica.spend(until_s, until_s - now_s)
        for replica in self._leaving:
            replica.run([], now_s, until_s, out)
            busy_s += replica.spend(until_s, until_s - now_s)
        self._settle(out)
        place = self._bin(now_s)
        self.tally.capacity_s[place] += (len(self._replicas) + len(self._leaving)) * (until_s - now_s)
        self.tally.busy_s[place] += busy_s
        self._leaving = [replica for replica in self._leaving if replica.waiting]

    def _close_windows(self, due: Due) -> dict[int, list[Arrival]]:
        """Count the windows that ended; returns those to compute, by replica and ordered by time."""
        camera, owner, rung = due.camera, self._owner[due.camera], self._rung[due.camera]
        self.tally.close(due.end_s, self._ranks[camera], due.stride_s, rung)
        serving = np.zeros(self._numbers + 1, dtype=bool)
        serving[list(self._replicas)] = True
        left = np.ones(len(camera), dtype=bool)
        for reason, gone in (
            (Lost.REFUSED, self._refused[camera]),
            (Lost.SHED, self._sheds[rung]),
            (Lost.NO_REPLICA, owner == NO_OWNER),
            (Lost.REPLICA_LOST, ~serving[owner]),
        ):
            self._drop_due(due, left & gone, reason)
            left &= ~gone
        value_s = due.stride_s * self._value[rung]
        stands = left & due.gated
        self._unreported.add(Fate.GATED, camera[stands])
        self.tally.gate(due.end_s[stands], self._ranks[camera[stands]], value_s[stands])
        left &= ~due.gated
        if self.plan.drop:
            gone = left & (self._rng.random(len(camera)) < self.plan.drop)
            self._drop_due(due, gone, Lost.RANDOM)
            left &= ~gone
        return self._make_arrivals(due, np.flatnonzero(left), value_s)

    def _drop_due(self, due: Due, gone: Bools, reason: Lost) -> None:
        if gone.any():
            self.tally.drop(due.end_s[gone], self._ranks[due.camera[gone]], reason)
            lost = gone & ~due.gated
            self.cameras.dropped(due.camera[lost], due.end_s[lost], due.strides[lost])

    def _make_arrivals(self, due: Due, which: Ints, value_s: Floats) -> dict[int, list[Arrival]]:
        camera = due.camera[which]
        owner, spread = self._owner[camera], self._spread[camera]
        strides = due.strides[which]
        expected, more = self._work.of(self._kinds[camera], self._rung[camera], due.held[which], strides)
        factor = np.exp(spread * self._rng.standard_normal(len(which)) - spread * spread / 2)
        order = np.argsort(owner, kind="stable")
        # In the order of Arrival's fields. Strides become integers because Python caches small ones.
        columns = (
            camera,
            due.end_s[which],
            due.stride_s[which],
            expected,
            factor * expected,
            strides.astype(np.int64),
            factor * more,
            value_s[which],
        )
        numbers, *values = (column[order].tolist() for column in columns)
        streams = [self.names[index] for index in numbers]
        # Equivalent to ``Arrival._make``, in a third of the time.
        make = partial(tuple.__new__, Arrival)
        arrivals: list[Arrival] = list(map(make, zip(streams, numbers, *values, strict=True)))
        if not arrivals:
            return {}
        owners = owner[order]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(owners)) + 1))
        ends = [*starts.tolist()[1:], len(which)]
        return {to: arrivals[a:b] for to, a, b in zip(owners[starts].tolist(), starts.tolist(), ends, strict=True)}

    def _settle(self, out: Outcome) -> None:
        if out.answered:
            _, *columns = zip(*out.answered, strict=True)
            camera, end_s, stride_s, _, work_s, _, _, value_s = map(np.array, columns)
            useful_s = work_s + self._costs.step_s / self.plan.engine.max_batch
            lag_s = np.array(out.finish_s) - end_s
            self.tally.answer(end_s, self._ranks[camera], lag_s, stride_s, value_s, useful_s)
            self._unreported.add(Fate.COMPUTED, camera)
        for reason, gone in out.dropped.items():
            self._unreported.add(Fate.DROPPED, self._drop(gone, reason))
        self._reencode_frames(out.unencoded)

    def _drop(self, gone: Sequence[Arrival], reason: str) -> Ints:
        """Count dropped windows; returns their cameras."""
        camera = np.array([arrival.camera for arrival in gone], dtype=np.int64)
        self.tally.drop(np.array([arrival.arrived_s for arrival in gone]), self._ranks[camera], reason)
        return camera

    def _reencode_frames(self, gone: Sequence[Arrival]) -> None:
        """Make the next windows of these cameras encode the frames of dropped ones."""
        camera = np.array([arrival.camera for arrival in gone], dtype=np.int64)
        end_s, strides = (np.array([getattr(arrival, name) for arrival in gone]) for name in ("arrived_s", "strides"))
        self.cameras.dropped(camera, end_s, strides)

    def _bin(self, now_s: float) -> int:
        return min(int(now_s / self.tally.bin_s), self.tally.bins - 1)


def _name(number: int) -> str:
    return f"replica-{number}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
