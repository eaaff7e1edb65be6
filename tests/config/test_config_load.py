"""Files, defaults, merging and environment: what comes out of a configuration that is right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import SightlineConfig, camera_settings, deep_merge, load_config, parse_camera
from cluster.config.load import expand, schema_text
from cluster.errors import ConfigError
from cluster.types import MemorySpec, Question, StreamSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    def write(text, name="city.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_defaults_are_those_of_the_documentation():
    config = load_config()
    assert config.engine == "native"
    assert (config.sampling.fps, config.sampling.anchor_interval_s) == (2.0, 16.0)
    assert (config.window.length_s, config.window.stride_s, config.window.max_idle_s) == (40, 8, 60)
    assert (config.window.refresh, config.window.static_gate, config.pruning.policy) == ("anchors", True, "replenish")
    assert (config.gateway.host, config.gateway.port, config.gateway.http_port) == ("127.0.0.1", 50051, 9464)
    assert config.gateway.max_packet_bytes == 4 * 2**20
    assert config.cluster.ray_address is None
    assert config.cameras == []


def test_a_camera_overrides_single_keys(write):
    config = load_config(
        write("""
window: {length_s: 30, stride_s: 5}
source: {backoff: {initial_s: 2, max_s: 20}, loop: true}
pruning: {policy: codecsight, options: {tau: 0.5}}
questions: [{id: person, text: "Is anyone there?"}]
cameras:
  - name: gate
    source: rtsp://camera/1
    window: {stride_s: 10}
    source_options: {backoff: {max_s: 9}}
  - name: yard
    pruning: {policy: none}
    questions: [{id: fire, text: "Is there fire?", threshold: 0.8, explain: true}]
""")
    )
    gate, yard = camera_settings(config, "gate"), camera_settings(config, "yard")
    assert (gate.window.length_s, gate.window.stride_s) == (30, 10)
    assert (gate.source_options.backoff.initial_s, gate.source_options.backoff.max_s) == (2, 9)
    assert gate.source_options.loop
    assert gate.pruning.options == {"tau": 0.5}
    # Another policy does not inherit parameters it does not have.
    assert yard.pruning.options == {}
    assert yard.window.stride_s == 5
    assert yard.stream_spec() == StreamSpec(
        "yard",
        (Question("fire", "Is there fire?", 0.8, True),),
        window_s=30,
        stride_s=5,
        fps=2.0,
        refresh="anchors",
        memory=MemorySpec(),
    )
    assert [question.id for question in gate.questions] == ["person"]


def test_an_engine_is_told_how_long_a_windows_sequence_may_be(write):
    config = load_config(
        write("""
sampling: {fps: 8, anchor_interval_s: 10}
questions: [{id: person, text: "Is anyone there?"}]
cameras: [{name: gate}, {name: yard, pruning: {policy: none}}]
""")
    )
    gate, yard = (camera_settings(config, name).stream_spec() for name in ("gate", "yard"))
    assert (gate.fps, gate.lookback_s) == (8, 10)
    # Whole frames open a window at its start.
    assert (yard.fps, yard.lookback_s) == (8, 0)


def test_overrides_lie_over_the_file(write):
    path = write("window: {length_s: 30, stride_s: 5}\nmodel: {name: tiny-qwen2_5_vl}\n")
    config = load_config(path, {"window": {"stride_s": 6}, "gateway": {"port": 0}})
    assert (config.window.length_s, config.window.stride_s, config.gateway.port) == (30, 6, 0)
    assert config.model.name == "tiny-qwen2_5_vl"


def test_environment_fills_in_secrets_and_numbers(write, monkeypatch):
    monkeypatch.setenv("CAMERA_PASSWORD", "s3cret")
    monkeypatch.setenv("GATEWAY_PORT", "6000")
    monkeypatch.delenv("NOBODY_SET_THIS", raising=False)
    config = load_config(
        write("""
gateway: {port: "${GATEWAY_PORT}", host: "${NOBODY_SET_THIS:-::1}"}
questions: [{id: q, text: "A price of $${x}?"}]
cameras: [{name: gate, source: "rtsp://admin:${CAMERA_PASSWORD}@camera/1"}]
""")
    )
    assert config.cameras[0].source.reveal() == "rtsp://admin:s3cret@camera/1"
    assert (config.gateway.port, config.gateway.host) == (6000, "::1")
    assert config.questions[0].text == "A price of ${x}?"


def test_anchors_and_merge_keys_of_yaml_work(write):
    config = load_config(
        write("""
questions: [{id: q, text: "Anyone?"}]
cameras:
  - {name: a, source: /a.mp4, window: &fast {length_s: 10, stride_s: 2}}
  - {name: b, source: /b.mp4, window: {<<: *fast, stride_s: 5}}
""")
    )
    assert camera_settings(config, "b").window.length_s == 10
    assert camera_settings(config, "b").window.stride_s == 5


def test_an_empty_file_is_all_defaults(write):
    assert load_config(write("# nothing yet\n")) == SightlineConfig()


def test_a_configuration_survives_being_written_out(write):
    config = load_config(write("questions: [{id: q, text: t}]\ncameras: [{name: a, window: {stride_s: 4}}]\n"))
    again = SightlineConfig.model_validate(config.model_dump(exclude_unset=True))
    assert again == config
    assert camera_settings(again, "a") == camera_settings(config, "a")


def test_a_camera_added_at_run_time():
    config = load_config(None, {"window": {"length_s": 20}})
    entry = parse_camera("new", "rtsp://x", [{"id": "q", "text": "Anyone?"}], {"window": {"stride_s": 4}})
    resolved = camera_settings(config, entry)
    assert (resolved.window.length_s, resolved.window.stride_s, resolved.source.reveal()) == (20, 4, "rtsp://x")
    with pytest.raises(ConfigError, match=r"camera new: windw: unknown key; did you mean 'window'\?"):
        parse_camera("new", settings={"windw": {}})
    with pytest.raises(ConfigError, match=r"camera new: window.stride_s: must not exceed the window's length_s = 20"):
        camera_settings(config, parse_camera("new", "", [{"id": "q", "text": "t"}], {"window": {"stride_s": 21}}))
    with pytest.raises(ConfigError, match="camera new: questions: camera 'new' has no question"):
        camera_settings(config, parse_camera("new"))


def test_every_field_is_described_and_every_section_closed():
    schema = SightlineConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert len(sections) >= 10
    for section in sections:
        assert section["additionalProperties"] is False, section["title"]
        for name, field in section["properties"].items():
            assert len(field.get("description", "")) > 15, f"{section['title']}.{name} is not described"


def test_fields_with_a_unit_say_so_in_their_name_or_description():
    units = {"_s": "second", "_bytes": "byte"}
    for section in [SightlineConfig.model_json_schema(), *SightlineConfig.model_json_schema()["$defs"].values()]:
        for name, field in section["properties"].items():
            for suffix, word in units.items():
                if name.endswith(suffix) and field.get("type") in ("number", "integer"):
                    assert word in field["description"].lower(), f"{section['title']}.{name}"


def test_the_schema_file_is_current():
    written = (ROOT / "configs" / "schema.json").read_text()
    assert written == schema_text(), "write it again: .venv/bin/sightline config schema > configs/schema.json"


@pytest.mark.parametrize(
    "path",
    ["configs/minimal.yaml", "deploy/compose/cpu.yaml", "deploy/helm/sightline/templates/_configuration.tpl"],
)
def test_first_configurations_have_the_bundled_models_threshold(path):
    model = json.loads((ROOT / "cluster" / "models" / "demo" / "sightline.json").read_text())
    (threshold,) = re.findall(r"threshold: ([\d.]+)", (ROOT / path).read_text())
    assert float(threshold) == pytest.approx(model["thresholds"]["intrusion"], abs=0.005)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_configurations_load(path, monkeypatch):
    monkeypatch.setenv("CAMERA_PASSWORD", "secret")
    config = load_config(path)
    # A load test brings its own.
    assert config.cameras or path.name == "loadtest.yaml"
    assert config.questions
    for camera in config.cameras:
        assert camera_settings(config, camera.name).questions


def test_the_examples_agree_with_the_schema(monkeypatch):
    jsonschema = pytest.importorskip("jsonschema")
    yaml = pytest.importorskip("yaml")
    schema = json.loads(schema_text())
    for path in (ROOT / "configs").glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_loading_needs_neither_torch_nor_ray():
    code = (
        "import sys; from cluster.config import load_config; load_config(); print({'torch', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@settings(deadline=None)
@given(mappings, mappings)
def test_merging_keeps_every_key_and_prefers_the_override(base, override):
    merged = deep_merge(base, override)
    assert merged.keys() == base.keys() | override.keys()
    assert deep_merge(merged, override) == merged
    assert deep_merge(base, {}) == base
    for key, value in override.items():
        if not isinstance(value, dict):
            assert merged[key] == value
    for key in base.keys() - override.keys():
        assert merged[key] == base[key]


@settings(deadline=None)
@given(st.text(alphabet="ab$${}:-X_", max_size=20))
def test_expansion_never_crashes_and_leaves_plain_text_alone(text):
    expanded, touched, problems = expand({"key": text}, {"X": "value"})
    if "${" not in text:
        assert (expanded, touched, problems) == ({"key": text}, set(), [])
    for problem in problems:
        assert problem.key == "key"


@pytest.mark.parametrize("secret", ["1234/x", "p#ss", "what?"])
def test_a_password_that_would_change_an_addresss_host_is_refused(secret):
    for source in ("rtsp://viewer:${PASSWORD}@camera/1", "rtsp://viewer:${NONE:-" + secret + "}@camera/1"):
        _, _, [problem] = expand({"source": source}, {"PASSWORD": secret})
        assert problem.path == ("source",)
        assert "percent-escape it" in problem.message
        assert secret not in problem.message
    # Anywhere else such a value is what it is.
    for text in ("${PASSWORD}", "rtsp://camera/${PASSWORD}", "https://${PASSWORD}/x?mail=a@b", "mail ${PASSWORD}@host"):
        assert expand({"text": text}, {"PASSWORD": secret})[2] == []
    escaped = {"PASSWORD": "p%23ss"}
    assert expand({"source": "rtsp://u:${PASSWORD}@c/1"}, escaped)[0] == {"source": "rtsp://u:p%23ss@c/1"}
