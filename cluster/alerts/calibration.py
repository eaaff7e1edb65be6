"""Proposes a question's threshold from incidents that people confirmed or rejected (``propose_threshold``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.alerts.incident import Incident
from cluster.alerts.timeline_store import BIN_S, ScoreBin
from cluster.errors import NotReadyError

FEWEST = 5
"""Minimum number of reviewed incidents of a question for a proposal."""
_DIGITS = 3
"""Decimals of a threshold, unless it must separate levels that are closer together."""


@dataclass(frozen=True, slots=True)
class Trade:
    """Effect of a threshold: ``kept`` of the ``confirmed`` incidents, ``avoided`` of the ``rejected`` ones, and the
    approximate number of incidents it would have ``opened`` over the recorded scores."""

    threshold: float
    kept: int
    confirmed: int
    avoided: int
    rejected: int
    opened: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed threshold of a question, equal to ``current`` if no other is better; ``reason``: why. ``trades``: by
    ascending threshold, including the current and the proposed one."""

    question: str
    current: float
    proposed: float
    reason: str
    trades: tuple[Trade, ...]


def propose_threshold(
    question: str,
    current: float,
    incidents: Sequence[Incident],
    bins: Sequence[ScoreBin] = (),
    *,
    keep: float = 1.0,
    cooldown_s: float = 60.0,
) -> Proposal:
    """Find the threshold that avoids most rejected incidents while keeping the share ``keep`` of the confirmed ones.

    An incident opens exactly at thresholds up to its ``level``. The proposal is the midpoint between the highest level
    avoided and the lowest one kept. A threshold below the current one is never proposed: nobody has reviewed the
    incidents it would open.

    Args:
        question: id of the question; ``current``: its present threshold.
        incidents: of any question; those without a verdict are ignored.
        bins, cooldown_s: see :func:`count_incidents`.
        keep: share of the confirmed incidents to keep, 0..1.

    Raises:
        NotReadyError: too few incidents are reviewed.
    """
    reviewed = [each for each in incidents if each.subject == question and each.verdict]
    confirmed = sorted(each.level for each in reviewed if each.verdict == "confirmed")
    rejected = sorted(each.level for each in reviewed if each.verdict == "rejected")
    if len(reviewed) < FEWEST:
        raise NotReadyError(
            f"question {question!r} has {len(reviewed)} confirmed or rejected incidents, and {FEWEST} are needed"
        )
    # Number of lowest confirmed levels that may be lost; 1e-9 absorbs binary rounding of decimal shares.
    lost = int(len(confirmed) * (1.0 - keep) + 1e-9)
    most = confirmed[lost] if lost < len(confirmed) else 1.0
    avoidable = [level for level in rejected if current <= level < most]
    least_kept = most
    if not rejected:
        proposed, reason = current, "no incident was rejected: there is nothing to avoid"
    elif not avoidable:
        proposed, reason = current, "every rejected incident scored as high as the confirmed ones that are to be kept"
    else:
        below = max(avoidable)
        least_kept = min((level for level in confirmed if level > below), default=1.0)
        proposed = _between(below, least_kept)
        # Just enough digits to tell the two apart: levels have passed through single precision.
        digits = next((n for n in range(_DIGITS, 17) if round(below, n) != round(least_kept, n)), 17)
        reason = f"between {below:.{digits}f}, which was rejected, and {least_kept:.{digits}f}, which was confirmed"
        if not confirmed:
            reason = f"above {below:.3f}, the highest that was rejected; none was confirmed"
    shown = {current, proposed}
    if proposed != current:
        # Also halfway to the proposal, and halfway from it to the level that would lose a confirmed incident.
        shown |= {_between(current, proposed), _between(proposed, least_kept)}
    trades = tuple(
        Trade(
            threshold,
            sum(level >= threshold for level in confirmed),
            len(confirmed),
            sum(level < threshold for level in rejected),
            len(rejected),
            count_incidents(bins, threshold, cooldown_s=cooldown_s),
        )
        for threshold in sorted(shown)
    )
    return Proposal(question, current, proposed, reason, trades)


def _between(low: float, high: float) -> float:
    """Midpoint, rounded to the fewest digits that keep it strictly between; ``high`` if none do."""
    middle = (low + high) / 2
    return next((each for digits in range(_DIGITS, 18) if low < (each := round(middle, digits)) < high), high)


def count_incidents(bins: Sequence[ScoreBin], threshold: float, *, cooldown_s: float = 60.0) -> int:
    """Estimate how many incidents a threshold would have opened, at a resolution of one minute: minutes that reach it
    belong to one incident unless they are more than ``cooldown_s`` apart."""
    count, last_s = 0, float("-inf")
    for each in bins:
        # Tolerance: levels have passed through single precision.
        if each.level and each.level >= threshold - 1e-6:
            count += each.at_s - last_s > BIN_S + cooldown_s
            last_s = each.at_s
    return count
