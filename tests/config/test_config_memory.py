"""What is remembered, where it lies, and what questions may take: defaults, overrides, and everything that is wrong."""

import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import MemoryConfig, SightlineConfig, camera_settings, load_config
from cluster.config.policies import MEMORY_POLICIES
from cluster.config.problems import parse_duration, parse_size, size_text
from cluster.errors import ConfigError
from cluster.types import AskSpec, MemorySpec
from cluster.wire.convert import spec_from_json, spec_to_json

QUESTIONS = "questions: [{id: q, text: t}]\n"


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "city.yaml"
        path.write_text(text)
        return load_config(path)

    return load


def test_defaults_are_those_of_the_engine():
    config = load_config()
    assert config.memory.spec() == MemorySpec()
    assert config.asking.max_new_tokens == AskSpec("gate", "?").max_new_tokens
    assert (config.tiers.host_bytes, config.tiers.node, config.tiers.redis_url) == (2**30, True, None)


def test_sizes_and_lengths_of_time_are_read_as_they_are_written(load):
    config = load("memory: {cap: 32MiB, retention: 24h}\ntiers: {host_bytes: 2GiB, redis_ttl_s: 7d}\n")
    spec = config.memory.spec()
    assert (spec.cap_bytes, spec.retention_s) == (32 * 2**20, 86400.0)
    assert (config.tiers.host_bytes, config.tiers.redis_ttl_s) == (2 * 2**30, 7 * 86400)
    assert SightlineConfig.model_validate(config.model_dump(exclude_unset=True)) == config


def cap_of(model, camera=None, **sections):
    text = {"model": model, "questions": [{"id": "fire", "text": "Fire?"}], "cameras": [{"name": "a"} | (camera or {})]}
    return camera_settings(load_config(None, text | sections), "a").stream_spec().memory.cap_bytes


@pytest.mark.parametrize(
    ("model", "mib"),
    [
        # Layers x key heads x (2 x (width + 2 of a scale) + 8 of frame and cell), of 6,144 tokens, in whole MiB.
        ({"name": "Qwen/Qwen2.5-VL-7B-Instruct"}, -(-6144 * 28 * 4 * 268 // 2**20)),
        ({"name": "Qwen/Qwen3-VL-8B-Instruct"}, -(-6144 * 36 * 8 * 268 // 2**20)),
        # More than a replica's host memory: the tier's size.
        ({"name": "llava-hf/LLaVA-NeXT-Video-7B-hf"}, 1024),
        ({"name": "demo"}, 64),
        ({"name": "tiny-qwen2_5_vl"}, 64),
        ({"name": "/nowhere"}, 64),
    ],
)
def test_the_default_cap_is_two_windows_of_the_model(model, mib):
    assert cap_of(model) == mib * 2**20


def test_a_default_cap_follows_what_is_configured(tmp_path):
    seven = {"name": "Qwen/Qwen2.5-VL-7B-Instruct"}
    assert cap_of(seven, {"memory": {"retention": "7d"}}) == 176 * 2**20
    assert cap_of(seven, {"memory": {"cap": None}}, memory={"cap": "1MiB"}) == 176 * 2**20
    assert cap_of(seven, memory={"cap": "1MiB"}) == 2**20
    assert cap_of(seven, tiers={"camera_bytes": "100MiB"}) == 100 * 2**20
    # Keys and values of two bytes a number, or four.
    stored = [-(-6144 * 28 * 4 * (2 * 128 * width + 8) // 2**20) * 2**20 for width in (2, 4)]
    for dtype, cap in zip(("bfloat16", "float32"), stored, strict=True):
        assert cap_of(seven | {"dtype": dtype}, memory={"kv_dtype": "model"}, tiers={"host_bytes": "4GiB"}) == cap
    for name, body in (("nested", {"text_config": {}}), ("flat", {})):
        folder = tmp_path / name
        folder.mkdir()
        shape = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
        text = dict.fromkeys(body, shape) or shape
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"} | text))
        assert cap_of({"name": str(folder)}) == 176 * 2**20
    # Null stands for as many key heads as heads, and for a text model at the top.
    shape = {"num_hidden_layers": 28, "num_attention_heads": 4, "num_key_value_heads": None, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": None} | shape))
    assert cap_of({"name": str(tmp_path)}) == 176 * 2**20


@pytest.mark.parametrize(("kind", "heads"), [("llama", 32), ("mistral", 8)])
def test_a_default_cap_of_a_config_that_leaves_out_its_librarys_defaults(tmp_path, kind, heads):
    """As the published LLaVA-NeXT-Video does: a folder of it had a memory of 240 tokens."""
    text = {"model_type": kind, "max_position_embeddings": 4096, "vocab_size": 32064}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava_next_video", "text_config": text}))
    assert cap_of({"name": str(tmp_path)}, tiers={"host_bytes": "4GiB"}) == 6144 * 32 * heads * 268


def test_a_default_cap_is_right_once_the_model_is_there(tmp_path):
    """Configurations are read before a hub's ``config.json`` is fetched, in the same process."""
    name = {"name": str(tmp_path / "later")}
    assert cap_of(name) == 64 * 2**20
    (tmp_path / "later").mkdir()
    shape = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    (tmp_path / "later" / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"} | shape))
    assert cap_of(name) == 176 * 2**20


def test_only_tiers_that_there_are_bound_a_cap():
    llava = {"name": "llava-hf/LLaVA-NeXT-Video-7B-hf"}
    redis = {"redis_url": "redis://127.0.0.1:1"}
    wanted = -(-6144 * 32 * 32 * 268 // 2**20) * 2**20
    assert cap_of(llava, tiers={"levels": ["node", "redis"], "node_bytes": "4GiB"} | redis) == wanted
    assert cap_of(llava, tiers={"levels": ["redis"]} | redis) == wanted
    assert cap_of(llava, memory={"cap": "2GiB"}, tiers={"levels": ["host"], "host_bytes": "3GiB", "node_bytes": "1MiB"})


def test_a_camera_overrides_single_keys_and_another_policy_drops_the_options_of_the_first(load):
    config = load(f"""{QUESTIONS}
memory:
  cap: 32MiB
  keep: 0.5
  compressor: cords
  compressor_options: {{bonus: 0.5}}
  retriever: wicsum
  retriever_options: {{ratio: 0.4}}
cameras:
  - {{name: a, memory: {{cap: 1MiB, compressor_options: {{active: 0.5}}}}}}
  - {{name: b, memory: {{compressor: sliding}}}}
  - {{name: c, memory: {{enabled: false}}}}
""")
    a, b, c = (camera_settings(config, name).stream_spec() for name in "abc")
    assert (a.memory.cap_bytes, a.memory.keep) == (2**20, 0.5)
    assert a.memory.compressor_options == {"bonus": 0.5, "active": 0.5}
    assert (b.memory.compressor, b.memory.compressor_options) == ("sliding", {})
    assert b.memory.retriever_options == {"ratio": 0.4}
    assert c.memory is None
    for spec in (a, b, c):
        assert spec_from_json(spec_to_json(spec)) == spec
        assert pickle.loads(pickle.dumps(spec)) == spec


WRONG = {
    "unknown compressor": (
        "memory:\n  compressor: cord",
        "2: memory.compressor: unknown compressor 'cord'; did you mean 'cords'? there are: ",
    ),
    "unknown organiser": ("memory: {organiser: mosiac}", "1: memory.organiser: unknown organiser 'mosiac'; did you me"),
    "unknown retriever of a camera": (
        QUESTIONS + "cameras:\n- name: a\n  memory: {retriever: wiksum}",
        "4: cameras[0].memory.retriever: unknown retriever 'wiksum'; did you mean 'wicsum'?",
    ),
    "unknown option": (
        "memory:\n  retriever: wicsum\n  retriever_options: {ration: 0.3}",
        "3: memory.retriever_options.ration: the retriever 'wicsum' has no parameter 'ration'; did you mean 'ratio'?",
    ),
    "a size is no option": (
        "memory:\n  compressor: cords\n  compressor_options: {columns: 3}",
        "3: memory.compressor_options.columns: the compressor 'cords' has no parameter 'columns'",
    ),
    "option of a policy that has none": (
        "memory: {compressor: sliding, compressor_options: {share: 1}}",
        "1: memory.compressor_options.share: the compressor 'sliding' has no parameter 'share'; it has none",
    ),
    "wrong type of an option": (
        "memory: {compressor: infinipot_v, compressor_options: {share: half}}",
        "1: memory.compressor_options.share: must be a valid number, not 'half'",
    ),
    "a number as text": (
        "memory: {compressor: infinipot_v, compressor_options: {share: '0.5'}}",
        "1: memory.compressor_options.share: must be a valid number, not '0.5'",
    ),
    "wrong type inside an option": (
        "memory: {compressor: infinipot_v, compressor_options: {steps: [0.1, 0.2]}}",
        "1: memory.compressor_options.steps: must be tuple[float, float, float] | None, not [0.1, 0.2]",
    ),
    "none of several types": (
        "memory: {retriever: two_stage, retriever_options: {clusters: few}}",
        "1: memory.retriever_options.clusters: must be int | float, not 'few'",
    ),
    "an option that is not finite": (
        "memory: {retriever: wicsum, retriever_options: {ratio: .nan}}",
        "1: memory.retriever_options.ratio: must be a finite number, not nan",
    ),
    "impossible value of an option": (
        "memory: {retriever: wicsum, retriever_options: {ratio: 2}}",
        "1: memory.retriever_options: the ratio of attention to retrieve is between 0 and 1, not 2",
    ),
    "frames that read clusters nobody makes": (
        "memory:\n  organiser: frames\n  frame_retrieval: resv",
        "3: memory.frame_retrieval: frame_retrieval 'resv' reads the hash-bit clusters that the organiser 'resv' "
        "makes, not 'frames'",
    ),
    "frames that read no memory": (
        QUESTIONS + "memory: {frame_retrieval: resv}\ncameras:\n- name: a\n  memory: {enabled: false}",
        "memory.frame_retrieval: 'resv' reads the memory, but memory.enabled is off; enable it, or set null",
    ),
    "frames that read the memory of an engine without": (
        "engine: vllm\nmemory: {frame_retrieval: resv}",
        "2: memory.frame_retrieval: vllm keeps no memory that frames could read",
    ),
    "options of no policy": (
        "memory: {frame_retrieval_options: {ratio: 0.5}}",
        "1: memory.frame_retrieval_options: belong to no policy; name one with frame_retrieval, or omit them",
    ),
    "no share of what frames read": (
        "memory: {frame_retrieval: resv, frame_retrieval_options: {ratio: 2}}",
        "1: memory.frame_retrieval_options: the ratio of attention to retrieve is between 0 and 1, not 2",
    ),
    "no time for what frames read": (
        "memory: {frame_retrieval: resv, frame_retrieval_options: {deadline_s: 0}}",
        "1: memory.frame_retrieval_options: the deadline of retrieval for frames must be positive, not 0 s",
    ),
    "no size": (
        "memory: {cap: large}",
        "1: memory.cap: must be a number of bytes, or a size like 512KiB, 64MiB",
    ),
    "a cap in the wrong unit": ("memory: {cap: 64}", "1: memory.cap: must be greater than or equal to 65536, not 64"),
    "no length of time": ("memory: {retention: long}", "1: memory.retention: must be a number of seconds, or a"),
    "nothing kept": ("memory: {keep: 0}", "1: memory.keep: must be greater than 0"),
    "compression that frees nothing": ("memory: {target: 1}", "1: memory.target: must be less than 1"),
    "more than the host has": (
        "tiers: {host_bytes: 32MiB}\nmemory:\n  cap: 64MiB",
        "3: memory.cap: must not exceed tiers.host_bytes = 32MiB, not 64MiB; lower it or raise that",
    ),
    "more than the node has": (
        QUESTIONS + "tiers: {node_bytes: 1GiB, host_bytes: 4GiB}\ncameras:\n- name: a\n  memory:\n    cap: 2GiB",
        "6: cameras[0].memory.cap: must not exceed tiers.node_bytes = 1GiB, not 2GiB",
    ),
    "more than one camera may have": (
        "memory: {cap: 64MiB}\ntiers: {camera_bytes: 1MiB}",
        "1: memory.cap: must not exceed tiers.camera_bytes = 1MiB, not 64MiB",
    ),
    "a Redis elsewhere and no key": (
        "tiers: {redis_url: 'redis://r'}",
        "security.memory_key_file: anyone who can write to a Redis on another machine could forge memories",
    ),
    "no Redis address": (
        "tiers: {redis_url: 'http://u:hunter2@r'}",
        "1: tiers.redis_url: the address of a Redis server looks like redis://host:6379/0, or rediss://host",
    ),
    "an option that redis-py does not have": (
        "tiers: {redis_url: 'rediss://:hunter2@localhost:6379/0?ssl_ca_cert=/etc/ca.pem'}",
        "1: tiers.redis_url: the address of a Redis server looks like redis://host:6379/0, or rediss://host",
    ),
    "unknown type": ("memory: {kv_dtype: int4}", "1: memory.kv_dtype: must be 'int8' or 'model', not 'int4'"),
    "no deadline": ("tiers: {deadline_s: 0}", "1: tiers.deadline_s: must be greater than 0"),
    "a share above one": ("asking: {share: 20}", "1: asking.share: must be less than or equal to 1, not 20"),
    "no queue": ("asking: {queue: 0}", "1: asking.queue: must be greater than or equal to 1"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG)
def test_wrong(text, expected, load):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_room_is_asked_only_of_tiers_that_are_used(load):
    load("tiers: {node: false, node_bytes: 1MiB}\n")
    load("memory: {enabled: false}\ntiers: {host_bytes: 1MiB}\n")


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "redis://u:p@localhost", "rediss://[::1]:1", "unix:///r"])
def test_a_redis_on_this_machine_needs_no_key(load, url):
    load(f"tiers: {{redis_url: '{url}'}}\n")


def test_a_redis_elsewhere_with_a_key(load):
    load("tiers: {redis_url: 'rediss://r:6379/0'}\nsecurity: {memory_key_file: /keys/memory}\n")


def test_a_problem_of_the_global_section_is_told_once(load):
    with pytest.raises(ConfigError) as caught:
        load(QUESTIONS + "memory: {organiser: x}\ncameras: [{name: a}, {name: b}]\n")
    assert len(caught.value.sentences()) == 1


@pytest.mark.parametrize("kind", MEMORY_POLICIES)
def test_defaults_are_there(kind):
    default = MemoryConfig.model_fields[kind].default
    assert default in MEMORY_POLICIES[kind] if kind != "frame_retrieval" else default is None


def test_names_are_checked_without_torch():
    code = (
        "import sys; from cluster.config import load_config\n"
        "load_config(None, {'memory': {'compressor': 'cords', 'frame_retrieval': 'resv', 'retriever': 'wicsum'}})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (5, 5),
        ("5", 5),
        (2e6, 2 * 10**6),
        ("512 KiB", 2**19),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        (" 1kB ", 1000),
    ],
)
def test_sizes(written, nbytes):
    assert parse_size(written) == nbytes


@pytest.mark.parametrize("written", ["", "-1", "64Mib", "1e9", "MiB", "64 MiB 3", True, None, 1.5, float("nan"), [1]])
def test_what_is_no_size(written):
    with pytest.raises(ValueError, match="must be a number of bytes, or a size like"):
        parse_size(written)


@given(st.integers(0, 2**50))
def test_a_size_reads_back(nbytes):
    assert parse_size(size_text(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(90, 90), ("90", 90), ("90s", 90), ("1.5 min", 90), ("10m", 600), ("24h", 86400), ("7d", 604800)],
)
def test_lengths_of_time(written, seconds):
    assert parse_duration(written) == seconds


@pytest.mark.parametrize("written", ["", "-1s", "2 weeks", "h", True, None, "1h30m"])
def test_what_is_no_length_of_time(written):
    with pytest.raises(ValueError, match="must be a number of seconds, or a duration like"):
        parse_duration(written)
