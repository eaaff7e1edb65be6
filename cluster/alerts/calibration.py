"""Proposes a question's threshold from incidents that people confirmed or rejected (``propose_threshold``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.alerts.incident import Incident
from cluster.alerts.timeline_store import BIN_S, ScoreBin
from cluster.errors import NotReadyError

FEWEST = 5
"""Reviewed incidents of a question that a proposal needs."""
_DIGITS = 3
"""Of a threshold, where two levels are not closer together."""


@dataclass(frozen=True, slots=True)
class Trade:
    """What a threshold does: ``kept`` of the ``confirmed`` incidents, ``avoided`` of the ``rejected`` ones, and about
    how many incidents (``opened``) it would have made of the scores that were looked at."""

    threshold: float
    kept: int
    confirmed: int
    avoided: int
    rejected: int
    opened: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """``trades``: by threshold, with that of now (``current``) and the proposed one among them. ``reason``: why it is
    what it is; ``proposed`` equals ``current`` where no other is better."""

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
    """The threshold that avoids most rejected incidents and still opens the share ``keep`` of the confirmed ones.

    An incident opens at a threshold exactly when the threshold is at most its ``level``. The proposal lies in the
    middle between the highest level that is avoided and the lowest that is kept. A threshold below the current one is
    never proposed: nobody has reviewed what it would open.

    Args:
        question: its id; ``current``: its threshold now.
        incidents: of any question; those without a verdict do not count.
        bins, cooldown_s: see :func:`count_incidents`.
        keep: 0..1, of the confirmed incidents.

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
    # So many of the lowest may be lost; tolerance for what is exact in decimals and not in binary.
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
        # Levels come through single precision: as many digits as tell the two apart, not all of them.
        digits = next((n for n in range(_DIGITS, 17) if round(below, n) != round(least_kept, n)), 17)
        reason = f"between {below:.{digits}f}, which was rejected, and {least_kept:.{digits}f}, which was confirmed"
        if not confirmed:
            reason = f"above {below:.3f}, the highest that was rejected; none was confirmed"
    shown = {current, proposed}
    if proposed != current:
        # Also half way there, and half way on to what would lose a confirmed one.
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
    """The middle, in as few digits as lie between the two (0.9995 and 0.9998); ``high`` where nothing does."""
    middle = (low + high) / 2
    return next((each for digits in range(_DIGITS, 18) if low < (each := round(middle, digits)) < high), high)


def count_incidents(bins: Sequence[ScoreBin], threshold: float, *, cooldown_s: float = 60.0) -> int:
    """About how many incidents a threshold would have opened, to the minute: minutes that reach it belong to one
    incident unless more than ``cooldown_s`` without such a minute lie between them."""
    count, last_s = 0, float("-inf")
    for each in bins:
        # Levels come through single precision.
        if each.level and each.level >= threshold - 1e-6:
            count += each.at_s - last_s > BIN_S + cooldown_s
            last_s = each.at_s
    return count
