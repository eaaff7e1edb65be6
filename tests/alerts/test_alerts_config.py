"""``alerts:`` in the configuration: what is refused and how, what a question overrides, what stays secret."""

import pytest

from cluster.alerts.health import question_rules
from cluster.config import camera_settings, load_config
from cluster.errors import ConfigError
from cluster.registry import sinks


def load(**alerts):
    return load_config(None, {"alerts": alerts})


def sink(kind: str, **options):
    return load(sinks=[{"name": "a", "kind": kind, "options": options}])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sink("webhok"), "alerts.sinks[0].kind: unknown alert sink 'webhok'; did you mean 'webhook'?"),
        (lambda: sink("webhook"), "alerts.sinks[0].options.url: is missing"),
        (lambda: sink("webhook", ulr="x"), "alerts.sinks[0].options.url: is missing"),
        (lambda: sink("webhook", url="http://h/", ulr="x"), "no parameter 'ulr'; did you mean 'url'?"),
        (lambda: sink("webhook", url="h"), "url must be an address like https://host/path, not 'h'"),
        (lambda: sink("webhook", url=3), "alerts.sinks[0].options.url: must be a valid string, not 3"),
        (lambda: sink("mqtt", url="mqtt://h", topic="a/#"), "topic must be text without + and #"),
        (lambda: sink("kafka", brokers="h:1", settings={"acks": "0"}), "settings must leave acks alone"),
        (lambda: sink("alertmanager", url="http://h/", hold_s=0.0), "hold_s must be above 0"),
        (
            lambda: sink("alertmanager", url="http://h/", hold_s=60),
            "alerts.sinks[0].options.hold_s: must exceed alerts.update_s = 60",
        ),
        (
            lambda: load(update_s="2h", sinks=[{"name": "a", "kind": "alertmanager", "options": {"url": "http://h/"}}]),
            "alerts.sinks[0].options.hold_s: must exceed alerts.update_s = 7200",
        ),
        (lambda: load(sinks=[{"name": "a", "kind": "log"}] * 2), "alerts.sinks: two sinks are called 'a'"),
        (lambda: load(consecutive=0), "alerts.consecutive: "),
        (lambda: load(health={"scene_change": {"after_s": "5m"}}), "alerts.health.scene_change.after_s: "),
        (
            lambda: load_config(None, {"questions": [{"id": "covered-lens", "text": "?"}]}),
            "names a state of the camera",
        ),
    ],
)
def test_what_is_refused(make, sentence):
    with pytest.raises(ConfigError) as refusal:
        make()
    assert sentence in str(refusal.value)


def test_every_sink_can_be_configured():
    options = {
        "webhook": {"url": "https://h/hook", "secret": "s", "headers": {"a": "b"}, "timeout_s": 2},
        "mqtt": {"url": "mqtts://u:p@h", "topic": "x/{camera}"},
        "kafka": {"brokers": "h:9092", "settings": {"security.protocol": "ssl"}},
        "alertmanager": {"url": "http://h:9093", "labels": {"site": "n"}},
        "log": {},
        "notify": {"url": "mailtos://ann:geheim@mail.example?to=ben@mail.example", "picture": False},
        "homeassistant": {"url": "mqtts://u:p@h", "node": "city"},
    }
    assert sorted(options) == sinks.names()
    for kind, given in options.items():
        assert sink(kind, **given).alerts.sinks[0].kind == kind


def test_a_question_overrides_the_section():
    config = load_config(
        None,
        {
            "alerts": {"consecutive": 3, "cooldown_s": "2m", "severity": "info", "release": 4},
            "questions": [
                {"id": "plain", "text": "?"},
                {"id": "own", "text": "?", "threshold": 0.7, "consecutive": 1, "cooldown_s": 0, "severity": "critical"},
            ],
            "cameras": [{"name": "gate"}],
        },
    )
    rules = question_rules(camera_settings(config, "gate"), config.alerts)
    plain, own = rules["plain"], rules["own"]
    assert (plain.threshold, plain.consecutive, plain.cooldown_s, plain.severity) == (0.5, 3, 120.0, "info")
    assert (own.threshold, own.consecutive, own.cooldown_s, own.severity) == (0.7, 1, 0.0, "critical")
    assert plain.release == own.release == 4


def test_one_key_of_a_state_leaves_its_others():
    rules = load(health={"offline": {"after_s": 5}, "frozen": {"enabled": False}}).alerts.health
    assert (rules.offline.after_s, rules.offline.severity) == (5.0, "critical")
    assert (rules.frozen.enabled, rules.frozen.after_s) == (False, 60.0)


def test_secrets_are_not_shown():
    assert "geheim" not in repr(sink("webhook", url="http://h/", secret="geheim"))
