"""Forms of replies that no border type has: what the OpenAPI document says of them."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from cluster.alerts.incident import Incident, Mute
from cluster.types import CameraStatus
from cluster.types.cameras import Discovery
from cluster.types.reports import ReplicaStatus
from cluster.wire.memory_wire import AskAllProgress


class Nothing(TypedDict):
    """An empty object: it is done."""


class Cameras(TypedDict):
    """``GET /v1/cameras``."""

    cameras: list[CameraStatus]


class CameraSettings(TypedDict):
    """What was written for a camera: ``settings`` has the keys of its section of the configuration but for name and
    source."""

    name: str
    source: str
    manager: str
    revision: str
    settings: dict[str, Any]


class ImportedCamera(TypedDict):
    """One camera of a list, by its line: what is wrong with it, and whether it was added."""

    line: int
    name: str
    source: str
    error: str
    added: bool


class ImportedCameras(TypedDict):
    """``POST /v1/cameras/import``."""

    cameras: list[ImportedCamera]


class DiscoveryLine(TypedDict, total=False):
    """One line of a search: progress, with the camera that is done, if any; or what went wrong."""

    discovery: Discovery
    error: str


class ReplayedWindow(TypedDict):
    """A past window: Unix times of its begin and end, P(yes) (null: nothing of it is remembered), and how many windows
    of how many are done."""

    start_s: float
    end_s: float
    score: float | None
    done: int
    total: int


class ReplayLine(TypedDict, total=False):
    """One line of a replay: a window, or what went wrong."""

    window: ReplayedWindow
    error: str


class RehearsedIncident(TypedDict):
    """An incident that a rule would have made; ``end_s``: null while it goes on."""

    start_s: float
    end_s: float | None
    score: float
    windows: int
    severity: str


class Rehearsal(TypedDict):
    """``POST /v1/rehearse``, oldest first; the rule with what the cluster's alerts section adds."""

    incidents: list[RehearsedIncident]
    rule: dict[str, Any]


class CameraHistory(TypedDict):
    """``scores``: per question, rows of Unix time of the window's end, score, positive, gated, seconds of video in the
    window; ``rungs``: rows of Unix time, rung, reason. Oldest first."""

    scores: dict[str, list[tuple[float, float, bool, bool, float]]]
    rungs: list[tuple[float, str, str]]


class Timeline(TypedDict):
    """``scores``: per question, rows of Unix time, highest score of the windows that ended within ``bin_s`` from it,
    highest threshold at which they would have opened an incident, windows, positive windows. ``states``: rows of Unix
    time, state, quality rung, how often video was lost so far. Oldest first."""

    bin_s: float
    scores: dict[str, list[tuple[float, float, float, int, int]]]
    states: list[tuple[float, str, str, int]]


class Replicas(TypedDict):
    """``GET /v1/replicas``."""

    replicas: list[ReplicaStatus]


class Lag(TypedDict):
    """Seconds from a window's last frame to its answer."""

    cameras: int
    median_s: float
    p95_s: float
    highest_s: float
    expected_highest_s: float


class Fleet(TypedDict):
    """All cameras that the token may see, added up, and the replicas."""

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
    """Mutes that hold."""

    mutes: list[Mute]


class ToldMoment(TypedDict):
    """A stretch of time that an answer rests on; ``picture``: JPEG in base64, where one was asked for and is there.
    Of a question to all: ``rank``, P(yes) times weight, and the ``incident`` whose clip shows it, or empty."""

    start: int
    end: int
    weight: float
    ago_s: float
    picture: NotRequired[str]
    rank: NotRequired[float]
    incident: NotRequired[str]


class AskReply(TypedDict):
    """The last line of an answer; see ``AskResult`` in protos/sightline/v1/memory.proto. ``remark``: where the question
    asks for more than the model answered, or empty; of ``/v1/ask`` alone."""

    text: str
    moments: list[ToldMoment]
    oldest: int
    newest: int
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
    """One line of an answer: a piece of its text, or at the end its result or what went wrong."""

    text: str
    result: AskReply
    error: str


class Unanswered(TypedDict):
    """A camera that did not answer. ``empty``: it only remembers nothing of that time."""

    camera: str
    error: str
    empty: bool


class AskAllLine(TypedDict, total=False):
    """One line of a question to all: a camera's answer, progress, or what went wrong."""

    answer: AskReply | Unanswered
    progress: AskAllProgress
    error: str


class ChatMessage(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(TypedDict):
    """``finish_reason``: stop, or length where the answer was cut."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class Usage(TypedDict):
    """Tokens of text: what was asked with what was said before, and the answer. What was read of the memory is in
    ``sightline``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class FleetReply(TypedDict):
    """What an answer of the model ``fleet`` rests on."""

    progress: AskAllProgress
    answers: list[AskReply | Unanswered]


class ChatCompletion(TypedDict):
    """OpenAI's form; ``sightline`` is ours: what the answer rests on."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    sightline: AskReply | FleetReply


class Model(TypedDict):
    """A camera as OpenAI's clients see it: ``camera/NAME``; ``fleet`` is all of them."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(TypedDict):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class OpenAiProblem(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiFailure(TypedDict):
    """An error in OpenAI's form."""

    error: OpenAiProblem


class Me(TypedDict):
    """Who the token is. ``authenticated``: false where nobody is asked for a token."""

    name: str
    roles: list[str]
    cameras: list[str]
    authenticated: bool


class SignInWays(TypedDict):
    """How people may sign in: with a token, at the provider of this name (empty: none), or not at all where neither
    is asked for."""

    tokens: bool
    provider: str


class Health(TypedDict):
    """It is well."""

    status: Literal["ok"]


class Failure(TypedDict):
    """What is wrong, and what would be right."""

    error: str
