"""Types of JSON replies that have no type in ``cluster.types``, for the OpenAPI document."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from cluster.alerts.incident import Incident, Mute
from cluster.types import CameraStatus
from cluster.types.cameras import Discovery
from cluster.types.reports import ReplicaStatus
from cluster.wire.memory_wire import AskAllProgress


class Nothing(TypedDict):
    """An empty object: done."""


class Cameras(TypedDict):
    """``GET /v1/cameras``."""

    cameras: list[CameraStatus]


class CameraSettings(TypedDict):
    """A camera's settings as written; ``settings``: keys of its entry in the configuration, except name and
    source."""

    name: str
    source: str
    manager: str
    revision: str
    settings: dict[str, Any]


class ImportedCamera(TypedDict):
    """One camera of a list, with its line, the error, if any, and whether it was added."""

    line: int
    name: str
    source: str
    error: str
    added: bool


class ImportedCameras(TypedDict):
    """``POST /v1/cameras/import``."""

    cameras: list[ImportedCamera]


class DiscoveryLine(TypedDict, total=False):
    """One line of a search: progress, with the camera just examined, if any; or an error."""

    discovery: Discovery
    error: str


class ReplayedWindow(TypedDict):
    """A past window: Unix times of its start and end, P(yes) (null: nothing in memory), and the number of windows
    ``done`` and in ``total``."""

    start_s: float
    end_s: float
    score: float | None
    done: int
    total: int


class ReplayLine(TypedDict, total=False):
    """One line of a replay: a window or an error."""

    window: ReplayedWindow
    error: str


class RehearsedIncident(TypedDict):
    """An incident that a rule would have opened; ``end_s``: null if it is still open."""

    start_s: float
    end_s: float | None
    score: float
    windows: int
    severity: str


class Rehearsal(TypedDict):
    """``POST /v1/rehearse``: incidents, oldest first, and the rule completed with the cluster's defaults."""

    incidents: list[RehearsedIncident]
    rule: dict[str, Any]


class CameraHistory(TypedDict):
    """``scores``: per question, rows of (Unix time of the window's end, score, positive, gated, seconds of video in the
    window). ``rungs``: rows of (Unix time, rung, reason). Oldest first."""

    scores: dict[str, list[tuple[float, float, bool, bool, float]]]
    rungs: list[tuple[float, str, str]]


class Timeline(TypedDict):
    """``scores``: per question, rows of (Unix time, highest score of windows that ended within ``bin_s`` after it,
    highest threshold at which they would have opened an incident, windows, positive windows). ``states``: rows of
    (Unix time, state, quality rung, number of gaps in the video so far). Oldest first."""

    bin_s: float
    scores: dict[str, list[tuple[float, float, float, int, int]]]
    states: list[tuple[float, str, str, int]]


class Replicas(TypedDict):
    """``GET /v1/replicas``."""

    replicas: list[ReplicaStatus]


class Lag(TypedDict):
    """Time from a window's last frame to its answer, in seconds."""

    cameras: int
    median_s: float
    p95_s: float
    highest_s: float
    expected_highest_s: float


class Fleet(TypedDict):
    """Totals over all cameras that the token may see, and the replicas."""

    cameras: int
    states: dict[str, int]
    rungs: dict[str, int]
    priorities: dict[str, int]
    windows_per_s: float
    lag: Lag
    windows: dict[str, int]
    tokens: dict[str, int]
    memory_bytes: int
    replicas: list[ReplicaStatus]
    seen_ago_s: float | None
    trouble: str


class Incidents(TypedDict):
    """``GET /v1/incidents``, newest first."""

    incidents: list[Incident]


class Mutes(TypedDict):
    """Active mutes."""

    mutes: list[Mute]


class ToldMoment(TypedDict):
    """A time span that an answer rests on; ``picture``: JPEG in base64, if requested and available. For a question to
    all: ``rank``, P(yes) times weight, and the ``incident`` whose clip shows it, or empty."""

    start: int
    end: int
    weight: float
    ago_s: float
    picture: NotRequired[str]
    rank: NotRequired[float]
    incident: NotRequired[str]


class AskReply(TypedDict):
    """Last line of an answer; see ``AskResult`` in protos/sightline/v1/memory.proto. ``remark``: note if the question
    asks for more than the model answered, else empty; only in ``/v1/ask``."""

    text: str
    moments: list[ToldMoment]
    oldest: int
    newest: int
    newest_age_s: float
    tokens_held: int
    tokens_read: int
    bytes_read: int
    first_token_s: float
    total_s: float
    degraded: bool
    prompt_tokens: int
    answer_tokens: int
    yes: float
    camera: str
    conversation: str
    remark: NotRequired[str]


class AskLine(TypedDict, total=False):
    """One line of an answer: a piece of its text, or finally its result or an error."""

    text: str
    result: AskReply
    error: str


class Unanswered(TypedDict):
    """A camera that did not answer. ``empty``: its memory holds nothing of that time."""

    camera: str
    error: str
    empty: bool


class AskAllLine(TypedDict, total=False):
    """One line of a question to all: a camera's answer, progress, or an error."""

    answer: AskReply | Unanswered
    progress: AskAllProgress
    error: str


class ChatMessage(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(TypedDict):
    """``finish_reason``: ``stop``, or ``length`` if the answer was cut off."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class Usage(TypedDict):
    """Text tokens of question and conversation, and of the answer. Tokens read from memory are in
    ``sightline``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class FleetReply(TypedDict):
    """Basis of an answer of the model ``fleet``."""

    progress: AskAllProgress
    answers: list[AskReply | Unanswered]


class ChatCompletion(TypedDict):
    """OpenAI's format; ``sightline`` is an extension: the basis of the answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    sightline: AskReply | FleetReply


class Model(TypedDict):
    """A camera as an OpenAI model, ``camera/NAME``; ``fleet`` stands for all cameras."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(TypedDict):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class OpenAiProblem(TypedDict):
    """The error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiFailure(TypedDict):
    """An error reply in OpenAI's format."""

    error: OpenAiProblem


class Me(TypedDict):
    """The caller. ``authenticated``: false if the gateway requires no tokens."""

    name: str
    roles: list[str]
    cameras: list[str]
    authenticated: bool


class SignInWays(TypedDict):
    """Ways to sign in: with a token, or at the provider of this name (empty: none). Neither: no sign-in is
    required."""

    tokens: bool
    provider: str


class Health(TypedDict):
    """Healthy."""

    status: Literal["ok"]


class Failure(TypedDict):
    """One sentence: the problem, and how to fix it."""

    error: str
