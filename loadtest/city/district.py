"""The part of a city under one controller: its fleet, its cameras and its replicas, tick by tick.

Replicas do not meet between two ticks, so each runs a tick on its own. What the controller hears and says takes effect
at the next tick.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cluster.control.camera_record import CameraMove
from cluster.control.costs import CostModel
from cluster.control.demand import stride_at
from cluster.control.fleet_settings import FleetSettings
from cluster.control.ladder import Step
from loadtest.city import Bools, Floats, Ints
from loadtest.city.cameras import Cameras, Due, UnreportedCounts
from loadtest.city.mix import Spell, Wake, wakes
from loadtest.city.plan import FULL, WAKE_S, CityPlan, Event, What
from loadtest.city.replica import Arrival, Facts, Outcome, Replica, WorkTable
from loadtest.city.result import Admitted
from loadtest.city.tally import Lost, Rows, Tally

NOBODY = -1


@dataclass(frozen=True, slots=True)
class DistrictPart:
    """What of the city is this district's. ``kinds``, ``phases``: of its cameras; ``kinds`` index the mix's classes."""

    kinds: Ints
    replicas: int
    costs: CostModel
    seed: tuple[int, ...]
    events: Sequence[Event] = ()
    spells: Sequence[Spell] = ()
    phases: Sequence[float] | None = None


class District:
    """See the module. After :meth:`run`, ``tally`` has every window that ended, and ``waiting`` were not settled;
    ``admitted`` is added to."""

    def __init__(self, plan: CityPlan, part: DistrictPart, admitted: Admitted) -> None:
        timing, classes = plan.timing, plan.mix.classes
        self.plan, self.part = plan, part
        self._admitted = admitted
        self.names = [f"{classes[kind].name}-{index:05d}" for index, kind in enumerate(part.kinds)]
        self.cameras = Cameras(classes, part.kinds, hour=plan.hour, rng=np.random.default_rng([*part.seed, 1]))
        self._ladder = plan.ladder or FULL
        self._value = np.array([rung.value for rung in self._ladder.rungs])
        self._sheds = np.array([rung.shed for rung in self._ladder.rungs])
        bins = max(1, round(timing.seconds / timing.bin_s))
        self.tally = Tally(bins=bins, bin_s=timing.seconds / bins, rungs=len(self._ladder.rungs))
        self._index = {name: index for index, name in enumerate(self.names)}
        self._rng = np.random.default_rng([*part.seed, 0])
        self._demands = [each.demand(each.name, plan.mix.geometry, plan.hour) for each in classes]
        # Over the stride at full quality, by kind and rung.
        self._strides = np.array(
            [[stride_at(each, rung) / each.stride_s for rung in self._ladder.rungs] for each in self._demands]
        )
        self._work = WorkTable(self._demands, self._ladder, part.costs, alike=plan.alike)
        self._ranks = np.array([each.priority.rank for each in classes])[part.kinds]
        kinds = part.kinds.tolist()
        self._facts = Facts([classes[kind].priority for kind in kinds], [classes[kind].window_s for kind in kinds])
        self._spread = np.array([each.activity.spread for each in classes])[part.kinds]
        count = len(self.names)
        # A window ends where its camera's first frame puts it.
        self._phases = self._rng.random(count).tolist() if part.phases is None else part.phases
        self._rung = np.zeros(count, dtype=np.int64)
        self._owner = np.full(count, NOBODY)
        self._refused = np.zeros(count, dtype=bool)
        self._rows = Rows(self.tally)
        self._unreported = UnreportedCounts(count)
        self._wakes: list[Wake] = wakes(part.spells, part.kinds, self._rng)
        # By number: replicas that serve, and those that only end the step under way.
        self._replicas: dict[int, Replica] = {}
        self._leaving: list[Replica] = []
        self._dead: dict[int, float] = {}
        self._numbers = 0
        self._carried: dict[int, list[Arrival]] = {}
        self._silent_until_s = 0.0
        self._was_silent = False
        self._settings = FleetSettings(part.costs, self._ladder, max_batch=plan.engine.max_batch)
        self._fleet = self._settings.fleet()
        self._events = sorted(part.events, key=lambda event: event.at_s)

    @property
    def waiting(self) -> int:
        """Windows that were neither answered nor given up."""
        return self._rows.open

    def run(self, on_share: Callable[[float], None] = lambda _: None) -> None:
        """From the beginning to the end; ``on_share`` is called now and then with the share that is done."""
        timing = self.plan.timing
        for _ in range(self.part.replicas):
            self._join(self._new_replica(0.0))
        for camera in range(len(self.names)):
            self._admit(camera)
        ticks = max(1, round(timing.seconds / timing.tick_s))
        for tick in range(ticks):
            self._tick(tick * timing.seconds / ticks, (tick + 1) * timing.seconds / ticks)
            if tick % 16 == 0:
                self._rows.forget_settled()
                on_share(tick / ticks)

    # -- the controller --------------------------------------------------------------------------
    def _admit(self, camera: int) -> None:
        demand = replace(self._demands[self.part.kinds[camera]], camera=self.names[camera])
        told = self._fleet.admit(demand, 0.0, force=self.plan.force)
        if told.verdict == "refused":
            self._admitted.refused += 1
            self._admitted.missing_replicas += told.missing_replicas / max(told.missing_streams, 1e-9)
            self._refused[camera] = True
            self.cameras.start(camera, 0.0, self._phases[camera])
            return
        self._admitted.reduced += told.verdict == "reduced"
        self._begin(camera, 0.0)

    def _join(self, replica: str) -> list[CameraMove]:
        held = self.part.costs.window_tokens
        return self._fleet.join(replica, window_tokens=math.inf if held is None else held)

    def _begin(self, camera: int, now_s: float) -> None:
        """A camera starts as its plan says, having no window anywhere."""
        plan = self._fleet.plan(self.names[camera])
        self._rung[camera] = self._ladder.index_of(plan.rung)
        self._owner[camera] = NOBODY if plan.owner is None else _number(plan.owner)
        self.cameras.factor[camera] = self._strides[self.part.kinds[camera], self._rung[camera]]
        self.cameras.start(camera, now_s, self._phases[camera])
        self._unreported.forget(camera, now_s)

    def _control(self, now_s: float) -> None:
        """Reports in, decisions out."""
        if now_s < self._silent_until_s:
            return
        for number, since_s in list(self._dead.items()):
            if now_s - since_s >= self.plan.timing.detect_s:
                del self._dead[number]
                self._apply(self._fleet.leave(_name(number)), now_s)
        for number, replica in self._replicas.items():
            self._fleet.replica_report(
                _name(number),
                busy_share=replica.busy_share,
                backlog_s=replica.backlog_s(now_s),
                steps=replica.steps,
                windows=replica.computed,
                now_s=now_s,
            )
        for camera, counts in self._unreported.due(now_s, self.plan.timing.report_s):
            if not self._refused[camera]:
                self._fleet.observe_counts(self.names[camera], counts)
        if steps := self._fleet.tick(now_s):
            self._take(steps, now_s)

    def _take(self, steps: Sequence[Step], now_s: float) -> None:
        """Steps on the ladder, at most one of a camera."""
        camera = np.array([self._index[step.camera] for step in steps])
        to = np.array([step.rung_to for step in steps])
        was_shed = self._sheds[[step.rung_from for step in steps]]
        self.tally.steps[self._bin(now_s)] += len(steps)
        # A replica reports every second, so that next to nothing of what it counts is from before and after a step.
        for each, counts in self._unreported.take(camera, now_s):
            self._fleet.observe_counts(self.names[each], counts, int(self._rung[each]))
        self._rung[camera] = to
        self.cameras.stretch(camera[~was_shed], self._strides[self.part.kinds[camera], to][~was_shed])
        for back, rung in zip(camera[was_shed].tolist(), to[was_shed].tolist(), strict=True):
            # Nobody has kept its frames.
            self.cameras.factor[back] = self._strides[self.part.kinds[back], rung]
            self.cameras.start(back, now_s, self._phases[back])

    def _apply(self, moves: Iterable[CameraMove], now_s: float) -> None:
        for move in moves:
            camera = self._index[move.camera]
            source = int(self._owner[camera])
            self.tally.moves[self._bin(now_s)] += 1
            waiting = self._release(camera)
            if not move.warm or source not in self._replicas:
                self._lose([arrival.window for arrival in waiting])
                self._begin(camera, now_s)
                continue
            self._owner[camera] = NOBODY if move.to is None else _number(move.to)
            if self._owner[camera] in self._replicas:
                self._carried.setdefault(int(self._owner[camera]), []).extend(waiting)
            else:
                self._lose([arrival.window for arrival in waiting])

    def _release(self, camera: int) -> list[Arrival]:
        """Its windows that wait at its replica, or are on their way there from another one."""
        owner = int(self._owner[camera])
        if owner not in self._replicas:
            return []
        carried = self._carried.get(owner, [])
        if carried:
            self._carried[owner] = [arrival for arrival in carried if arrival.camera != camera]
        mine = [arrival for arrival in carried if arrival.camera == camera]
        return self._replicas[owner].release(self.names[camera]) + mine

    def _lose(self, rows: Sequence[int]) -> None:
        if rows:
            self.cameras.dropped(*self._rows.dropped(rows, Lost.REPLICA_LOST))

    def _restart_controller(self, now_s: float) -> None:
        """It knows its configuration, and what the replicas that live say they hold."""
        self._fleet = self._settings.fleet()
        self._dead.clear()
        for number in self._replicas:
            self._join(_name(number))
        for camera in np.flatnonzero(~self._refused).tolist():
            owner, name = int(self._owner[camera]), self.names[camera]
            held = owner in self._replicas
            demand = replace(self._demands[self.part.kinds[camera]], camera=name)
            self._fleet.admit(demand, now_s, force=True, prefer=_name(owner) if held else None)
            plan = self._fleet.plan(name)
            if not held or plan.owner != _name(owner) or self._sheds[self._rung[camera]]:
                self._lose([arrival.window for arrival in self._release(camera)])
                self._begin(camera, now_s)
            else:
                self._rung[camera] = self._ladder.index_of(plan.rung)
                self.cameras.stretch(camera, self._strides[self.part.kinds[camera], self._rung[camera]])
                self._unreported.forget(camera, now_s)

    # -- what happens to it ----------------------------------------------------------------------
    def _happen(self, now_s: float, until_s: float) -> None:
        while self._events and self._events[0].at_s < until_s:
            event = self._events.pop(0)
            if event.what is What.DRAIN and now_s < self._silent_until_s:
                # Nobody is there to hand its cameras to others.
                back_s = max(until_s, self._silent_until_s)
                insort(self._events, replace(event, at_s=back_s), key=lambda each: each.at_s)
                continue
            match event.what:
                case What.WAKE:
                    reached = self._rng.random(len(self.names)) < event.amount
                    self._wakes.append(Wake(event.at_s, event.at_s + WAKE_S, reached))
                case What.CONTROLLER:
                    self._silent_until_s = now_s + event.amount
                case What.JOIN:
                    for _ in range(int(event.amount)):
                        name = self._new_replica(now_s)
                        if now_s >= self._silent_until_s:
                            self._apply(self._join(name), now_s)
                case What.KILL | What.DRAIN:
                    for number in self._chosen(int(event.amount)):
                        self._remove(number, now_s, dies=event.what is What.KILL)

    def _chosen(self, count: int) -> list[int]:
        numbers = sorted(self._replicas)
        return [numbers[place] for place in sorted(self._rng.choice(len(numbers), count, replace=False).tolist())]

    def _remove(self, number: int, now_s: float, *, dies: bool) -> None:
        if dies:
            replica = self._replicas.pop(number)
            held = [self.names[camera] for camera in np.flatnonzero(self._owner == number).tolist()]
            self._lose([*replica.die(held), *(arrival.window for arrival in self._carried.pop(number, ()))])
            self._dead[number] = now_s
            return
        # Where it was the only one, nobody takes them.
        self._apply([*self._fleet.drain(_name(number)), *self._fleet.leave(_name(number))], now_s)
        self._leaving.append(self._replicas.pop(number))

    def _new_replica(self, now_s: float) -> str:
        number = self._numbers
        self._numbers += 1
        rng = np.random.default_rng([*self.part.seed, 2, number])
        self._replicas[number] = Replica(self.part.costs, self.plan.engine, self._facts, rng, now_s)
        return _name(number)

    # -- one tick --------------------------------------------------------------------------------
    def _tick(self, now_s: float, until_s: float) -> None:
        self._happen(now_s, until_s)
        if self._was_silent and now_s >= self._silent_until_s:
            self._restart_controller(now_s)
        self._was_silent = now_s < self._silent_until_s
        self._control(now_s)
        wakes = [wake for wake in self._wakes if wake.start_s < until_s and wake.end_s > now_s]
        arrivals = self._deliver(self.cameras.due(until_s, wakes))
        out, busy_s = Outcome(), 0.0
        for number, replica in self._replicas.items():
            mine = arrivals.get(number, [])
            if number in self._carried:
                mine = sorted(self._carried.pop(number), key=lambda arrival: arrival.arrived_s) + mine
            replica.run(mine, now_s, until_s, out)
            busy_s += replica.spend(until_s, until_s - now_s)
        for replica in self._leaving:
            replica.run([], now_s, until_s, out)
            busy_s += replica.spend(until_s, until_s - now_s)
        self._settle(out)
        place = self._bin(now_s)
        self.tally.capacity_s[place] += (len(self._replicas) + len(self._leaving)) * (until_s - now_s)
        self.tally.busy_s[place] += busy_s
        self._leaving = [replica for replica in self._leaving if not replica.idle]

    def _deliver(self, due: Due) -> dict[int, list[Arrival]]:
        """Count what ended; the computed windows, by replica and in order of time."""
        camera, owner, rung = due.camera, self._owner[due.camera], self._rung[due.camera]
        self.tally.close(due.end_s, self._ranks[camera], due.stride_s, rung)
        serving = np.zeros(self._numbers + 1, dtype=bool)
        serving[list(self._replicas)] = True
        left = np.ones(len(camera), dtype=bool)
        for reason, gone in (
            (Lost.REFUSED, self._refused[camera]),
            (Lost.SHED, self._sheds[rung]),
            (Lost.NO_REPLICA, owner == NOBODY),
            (Lost.REPLICA_LOST, ~serving[owner]),
        ):
            self._give_up(due, left & gone, reason)
            left &= ~gone
        value_s = due.stride_s * self._value[rung]
        stands = left & due.gated
        self._unreported.gated(camera[stands])
        self.tally.gate(due.end_s[stands], self._ranks[camera[stands]], value_s[stands])
        return self._send(due, np.flatnonzero(left & ~due.gated), value_s)

    def _give_up(self, due: Due, gone: Bools, reason: Lost) -> None:
        if gone.any():
            self.tally.drop(due.end_s[gone], self._ranks[due.camera[gone]], reason)
            lost = gone & ~due.gated
            self.cameras.dropped(due.camera[lost], due.end_s[lost], due.strides[lost])

    def _send(self, due: Due, which: Ints, value_s: Floats) -> dict[int, list[Arrival]]:
        camera = due.camera[which]
        owner, spread = self._owner[camera], self._spread[camera]
        kind, rung, strides = self.part.kinds[camera], self._rung[camera], due.strides[which]
        held = due.held[which]
        expected, more = self._work.of(kind, rung, held, strides)
        factor = np.exp(spread * self._rng.standard_normal(len(which)) - spread * spread / 2)
        work, more = factor * expected, factor * more
        end_s, stride_s = due.end_s[which], due.stride_s[which]
        first = self._rows.append(
            camera=camera,
            rank=self._ranks[camera],
            end_s=end_s,
            stride_s=stride_s,
            strides=strides,
            value_s=value_s[which],
            useful_s=work + self.part.costs.step_s / self.plan.engine.max_batch,
        )
        order = np.argsort(owner, kind="stable")
        numbers = camera[order].tolist()
        streams = [self.names[index] for index in numbers]
        # Where a window lies on its camera's clock is nothing that the queue looks at.
        nowhere = [0] * len(streams)
        # Strides are whole numbers, and small ones of those are not made anew each time.
        columns = (stride_s, expected, work, strides.astype(np.int64), more)
        values = (column[order].tolist() for column in columns)
        # What ``_make`` does, at a third of its time.
        make = partial(tuple.__new__, Arrival)
        rows = zip(
            streams, (first + order).tolist(), nowhere, nowhere, end_s[order].tolist(), numbers, *values, strict=True
        )
        arrivals: list[Arrival] = list(map(make, rows))
        if not arrivals:
            return {}
        owners = owner[order]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(owners)) + 1))
        ends = [*starts.tolist()[1:], len(which)]
        return {to: arrivals[a:b] for to, a, b in zip(owners[starts].tolist(), starts.tolist(), ends, strict=True)}

    def _settle(self, out: Outcome) -> None:
        self._unreported.answered(self._rows.answered(out.answered, out.finish_s))
        for reason, rows in out.dropped.items():
            camera, end_s, strides = self._rows.dropped(rows, reason)
            unencoded = np.isin(rows, out.unencoded)
            self.cameras.dropped(camera[unencoded], end_s[unencoded], strides[unencoded])
            self._unreported.dropped(camera)

    def _bin(self, now_s: float) -> int:
        return min(int(now_s / self.tally.bin_s), self.tally.bins - 1)


def _name(number: int) -> str:
    return f"replica-{number}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
