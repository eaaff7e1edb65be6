"""Everything a configuration can get wrong: each error names file, line, key and what would be right."""

import pickle

import pytest

from cluster.config import InvalidConfigError, camera_settings, load_config
from cluster.errors import ConfigError

# What is written, and what the one-line error must hold after "FILE:".
WRONG = {
    "misspelt section": (
        "windw: {length_s: 4}",
        "1: windw: unknown key; did you mean 'window'? keys here: model, engine",
    ),
    "misspelt key": (
        "window:\n  lenght_s: 20",
        "2: window.lenght_s: unknown key; did you mean 'length_s'? keys here: length_s, stride_s",
    ),
    "key of nowhere": ("gateway: {zzz: 1}", "1: gateway.zzz: unknown key; keys here: host, port"),
    "nested in a camera": (
        "cameras:\n  - name: a\n    source_options:\n      backoff: {inital_s: 1}",
        "4: cameras[0].source_options.backoff.inital_s: unknown key; did you mean 'initial_s'?",
    ),
    "out of range": (
        "sampling:\n  fps: -1",
        "2: sampling.fps: must be greater than 0, not -1 (Frames sampled per second",
    ),
    "not finite": ("sampling: {fps: .nan}", "1: sampling.fps: must be"),
    "wrong type": (
        "window: {length_s: long}",
        "1: window.length_s: must be a valid number, not 'long' (Seconds of video",
    ),
    "a number for a section": ("source: 3", "1: source: must be a section with keys of its own, not 3"),
    "a list for a section": ("window: [1]", "1: window: must be a section with keys of its own"),
    "a section for a list": ("cameras: {name: a}", "1: cameras: must be a valid list"),
    "wrong choice": (
        "model: {dtype: bfloat}",
        "1: model.dtype: must be 'float32', 'bfloat16', 'float16' or 'float8', not 'bfloat'; did you",
    ),
    "float8 on vLLM": ("engine: vllm\nmodel: {dtype: float8}", "2: model.dtype: float8 needs the native engine"),
    "wrong device": (
        "model: {device: cuda:1}",
        "1: model.device: must be cpu, cuda or cuda:0 (CUDA_VISIBLE_DEVICES chooses the card), not 'cuda:1'",
    ),
    "unknown engine": ("engine: vlm", "not 'vlm'; did you mean 'vllm'?"),
    "missing name": ("cameras:\n  - source: x", "2: cameras[0].name: is missing; it means: Unique name of the camera"),
    "camera name with a space": ("cameras: [{name: a b}]", "1: cameras[0].name: "),
    "camera name that is an option": ("cameras: [{name: -g}]", "1: cameras[0].name: "),
    "camera name of a folder": ("cameras: [{name: ..}]", "1: cameras[0].name: "),
    "the same camera twice": (
        "questions: [{id: q, text: t}]\ncameras:\n  - name: a\n  - name: a",
        "4: cameras[1].name: two cameras are called 'a'; names must be unique",
    ),
    "the same question twice": (
        "questions:\n  - {id: q, text: t}\n  - {id: q, text: u}",
        "3: questions[1].id: two questions are called 'q'; ids must be unique",
    ),
    "no question": ("cameras:\n  - name: a", "2: cameras[0].questions: camera 'a' has no question; add one here"),
    "stride over window": (
        "window:\n  stride_s: 50",
        "2: window.stride_s: must not exceed the window's length_s = 40, not 50",
    ),
    "more windows than anything can answer": (
        "window:\n  stride_s: 0.000001",
        "2: window.stride_s: must be greater than or equal to 0.1, not 1e-06",
    ),
    "stride over a camera's window": (
        "questions: [{id: q, text: t}]\nwindow:\n  stride_s: 8\ncameras:\n  - name: a\n    window: {length_s: 8.5}\n"
        "  - name: b\n    window: {stride_s: 41}",
        "8: cameras[1].window.stride_s: must not exceed the window's length_s = 40, not 41",
    ),
    "anchors beyond the window": (
        "sampling: {anchor_interval_s: 60}",
        "1: sampling.anchor_interval_s: must not exceed window.length_s = 40, not 60",
    ),
    "a window without a frame": (
        "sampling: {fps: 0.02}",
        "1: sampling.fps: at 0.02 frames per second a window of 40 s would hold no frame",
    ),
    "backoff upside down": (
        "source:\n  backoff:\n    initial_s: 5\n    max_s: 1",
        "4: source.backoff.max_s: must not be below initial_s = 5, not 1",
    ),
    "heartbeats": (
        "cluster: {heartbeat_s: 5, heartbeat_timeout_s: 5}",
        "1: cluster.heartbeat_timeout_s: must be above heartbeat_s = 5, not 5",
    ),
    "decoders upside down": (
        "cluster: {decoders: 3, max_decoders: 2}",
        "1: cluster.max_decoders: must be at least decoders = 3, not 2",
    ),
    "gateways on one machine": (
        "cluster: {gateways: 2}",
        "1: cluster.gateways: 2 gateways on the same ports need a node each; set cluster.placement.gateway to a Ray "
        "resource of which each such node offers 1, or gateway.port and gateway.http_port to 0",
    ),
    "one port for two": (
        "gateway: {port: 99, http_port: 99}",
        "1: gateway.http_port: must differ from port, both are 99",
    ),
    "a port that other processes take": (
        "cluster: {metrics_port: 9460}",
        "gateway.http_port: must not be in 9460 to 9475, which other processes use from cluster.metrics_port on",
    ),
    "a packet that never fits": (
        "gateway: {max_packet_bytes: 60000000}",
        "cluster.packet_queue_bytes: must be at least gateway.max_packet_bytes = 60000000",
    ),
    "unknown pruner": (
        "pruning:\n  policy: replenis",
        "2: pruning.policy: unknown pruner 'replenis'; did you mean 'replenish'? there are: codecsight, none",
    ),
    "unknown parameter of a pruner": (
        "questions: [{id: q, text: t}]\ncameras:\n- name: a\n  pruning:\n    policy: codecsight\n    options: {taw: 1}",
        "6: cameras[0].pruning.options.taw: the pruner 'codecsight' has no parameter 'taw'; did you mean 'tau'? it has",
    ),
    "wrong type of a parameter": (
        "pruning:\n  policy: codecsight\n  options: {tau: high}",
        "3: pruning.options.tau: must be a valid number, not 'high'",
    ),
    "unknown refresh policy": (
        "window:\n  refresh: anchor",
        "2: window.refresh: unknown refresh policy 'anchor'; did you mean 'anchors'? there are: all, anchors, budget",
    ),
    "duplicate key": (
        "window:\n  stride_s: 8\n  stride_s: 9",
        "3: window.stride_s: is given twice, first on line 2; keep one",
    ),
    "unset variable": (
        "gateway:\n  host: ${NOBODY_SETS_THIS}",
        "2: gateway.host: environment variable NOBODY_SETS_THIS is not set; set it, or write ${NOBODY_SETS_THIS:-de",
    ),
    "broken reference": ("gateway: {host: '${a b}'}", "1: gateway.host: '${a b}' names no variable; write ${NAME}"),
    "not YAML": ("window: {length_s: 4", "is not valid YAML: "),
    "tab": ("window:\n\tlength_s: 4", "2: is not valid YAML: "),
    "not a mapping": ("- a\n- b", "1: must be a mapping of sections"),
    "two documents": ("window: {}\n---\nwindow: {}", "is not valid YAML: "),
    "an object": (
        "window: !!python/object:os.system {}",
        "1: window: has the tag 'tag:yaml.org,2002:python/object:os.system'; a con",
    ),
    "an object as value": ("engine: !!python/object:os.system {}", "1: engine: has the tag"),
    "an object as text": ("engine: !!python/name:os.system ''", "is not valid YAML: could not determine a constructor"),
    "a mapping as key": ("? {a: b}\n: c", "1: a key must be a plain name"),
    "an alias of itself": ("window: &w\n  options: *w", "window.options: refers to itself through an alias"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG)
def test_wrong(text, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("NOBODY_SETS_THIS", raising=False)
    path = tmp_path / "city.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert expected in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


def test_all_problems_are_listed_and_the_first_one_is_the_message(tmp_path):
    path = tmp_path / "city.yaml"
    path.write_text("sampling: {fps: 0}\nwindow: {length: 1}\nmodel: {seed: -1}\n")
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path)
    assert len(caught.value.sentences()) == 3
    assert {problem.key for problem in caught.value.problems} == {"sampling.fps", "window.length", "model.seed"}
    assert {problem.line for problem in caught.value.problems} == {1, 2, 3}
    assert "(and 2 more: `sightline config check` lists them)" in str(caught.value)


def test_the_error_survives_the_way_to_another_process(tmp_path):
    path = tmp_path / "city.yaml"
    path.write_text("sampling: {fps: 0}\nwindow: {length: 1}\n")
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.sentences()) == (str(caught.value), caught.value.sentences())


def test_aliases_that_explode_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="values once aliases are expanded"):
        load_config(path)


def test_deep_nesting_is_refused(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"nested too deeply|not valid YAML"):
        load_config(path)


def test_a_secret_is_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("FPS", "hunter2")
    path = tmp_path / "city.yaml"
    path.write_text("sampling: {fps: '${FPS}'}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "sampling.fps: must be a valid number" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_override_is_blamed_without_a_line(tmp_path):
    path = tmp_path / "city.yaml"
    path.write_text("sampling:\n  fps: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {"sampling": {"fps": 0}})
    assert str(caught.value).startswith(f"{path}: sampling.fps: ")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="there is no such configuration file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "video.yaml").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="is not a text file in UTF-8"):
        load_config(tmp_path / "video.yaml")


def test_an_unknown_camera_names_those_there_are():
    config = load_config(
        None, {"questions": [{"id": "q", "text": "t"}], "cameras": [{"name": "gate"}, {"name": "yard"}]}
    )
    with pytest.raises(ConfigError, match="there is no camera 'gte' in the configuration; there are: gate, yard"):
        camera_settings(config, "gte")
