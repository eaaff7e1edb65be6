"""``sightline cameras calibrate``: thresholds from incidents that people confirmed or rejected."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.camera_files import Takeover
from actors.cli.options import DEFAULT_GATEWAY, Gateway, Json, connect, parse_duration
from actors.cli.output import console, make_table, print_json
from cluster.errors import ConfigError, NotReadyError

if TYPE_CHECKING:
    from cluster.alerts.calibration import Proposal
    from cluster.client import GatewayClient
    from cluster.config.camera import QuestionConfig

MOST = 1000
REVIEW = "review more with `sightline incidents confirm` and `reject`, or in the console"


def calibrate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the camera.")],
    question: Annotated[
        list[str] | None, typer.Option("--question", "-q", metavar="ID", help="Only this question; may be repeated.")
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the confirmed incidents that must still open.")
    ] = 1.0,
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="Period of scores to count incidents in; scores are kept for 2d.")
    ] = "1d",
    apply: Annotated[bool, typer.Option("--apply", help="Save the proposed thresholds to the camera.")] = False,
    takeover: Takeover = False,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Propose a threshold per question from confirmed and rejected incidents.

    Shows how many confirmed incidents each threshold keeps, how many rejected ones it avoids, and about how many
    incidents it would have opened. Changes nothing without --apply.

    $ sightline cameras calibrate gate

    $ sightline cameras calibrate gate --keep 0.95 --apply
    """
    from cluster.control.cameras.managed import settings_of

    since_s = time.time() - parse_duration(since, "--since")
    with connect(gateway) as client:
        [camera] = client.cameras_export([name], secrets=True)
        asked = camera.entry.questions or []
        if not asked:
            raise ConfigError(
                f"camera {name!r} uses the cluster's questions; give it its own first, where it is defined or with "
                f"`sightline cameras update {name} -q ID=TEXT`"
            )
        ids = [each.id for each in asked]
        if unknown := set(question or []).difference(ids):
            raise ConfigError(f"camera {name!r} has no question {min(unknown)!r}; it has: {', '.join(ids)}")
        proposals, missing = _proposals(
            client, name, [e for e in asked if not question or e.id in question], since_s, keep
        )
        if not proposals:
            raise NotReadyError("; ".join([*missing, REVIEW]))
        better = {each.question: each.proposed for each in proposals if each.proposed != each.current}
        if apply and better:
            settings = settings_of(camera.entry)
            for each in settings["questions"]:
                each["threshold"] = better.get(each["id"], each.get("threshold", 0.5))
            client.camera_update(name, camera.entry.source, settings, takeover=takeover, revision=camera.revision)
    if print_json(json, proposals):
        _show(proposals, missing)
        if apply:
            said = ", ".join(f"threshold of {each} is {_digits(threshold)}" for each, threshold in better.items())
            print(f"{name}: {said or 'nothing to change'}")
        elif better:
            print("repeat the command with `--apply` to save")


def _proposals(
    client: GatewayClient, name: str, asked: list[QuestionConfig], since_s: float, keep: float
) -> tuple[list[Proposal], list[str]]:
    """Proposals, and the reasons for questions without one."""
    from cluster.alerts.calibration import propose_threshold

    verdicts = ("confirmed", "rejected")
    reviewed = [each for said in verdicts for each in client.incidents(camera=name, verdict=said, limit=MOST)]
    timeline = client.timeline(name, since_s)
    found, missing = [], []
    for each in asked:
        cooldown_s = timeline.cooldown_s if each.cooldown_s is None else each.cooldown_s
        try:
            bins = timeline.scores.get(each.id, ())
            # Scores of another wording do not apply to this one.
            same = [incident for incident in reviewed if incident.question in ("", each.text)]
            found.append(propose_threshold(each.id, each.threshold, same, bins, keep=keep, cooldown_s=cooldown_s))
        except NotReadyError as error:
            missing.append(str(error))
    return found, missing


def _digits(threshold: float) -> str:
    """Three decimals, or all where rounding would change the value: 0.9995 is not 1.000."""
    shown = f"{threshold:.3f}"
    return shown if float(shown) == threshold else str(threshold)


def _show(proposals: list[Proposal], missing: list[str]) -> None:
    rows = []
    for proposal in proposals:
        for trade in proposal.trades:
            mark = {proposal.proposed: "proposed", proposal.current: "now"}
            mark |= {proposal.current: "now, stays"} if proposal.proposed == proposal.current else {}
            rows.append(
                (
                    proposal.question,
                    _digits(trade.threshold),
                    f"{trade.kept} of {trade.confirmed}",
                    f"{trade.avoided} of {trade.rejected}",
                    str(trade.opened),
                    mark.get(trade.threshold, ""),
                )
            )
    screen = console()
    screen.print(make_table("question|>threshold|>confirmed kept|>rejected avoided|>incidents|", rows), markup=False)
    lines = [*(f"{each.question}: {each.reason}" for each in proposals), *missing, *([REVIEW] if missing else [])]
    screen.print("\n".join(lines), markup=False)
