"""Every file, section, module, class, key and metric that the documentation names is there."""

import functools
import importlib.util
import re

import pytest
import yaml
from doc_parts import DOCUMENTS, ROOT, anchors, blocks, inline, links, read

from cluster.config import SightlineConfig
from cluster.config.load import load_tree, read_yaml

FOLDERS = ("actors", "cluster", "configs", "deploy", "docs", "loadtest", "protos", "tests")
SOURCES = ("*.py", "*.proto", "*.js", "*.json", "*.yaml", "*.md", "*.html", "*.svg", "*.png", "Dockerfile*")
HANDWRITTEN = [document for document in DOCUMENTS if document.name != "api.md"]


def names(documents):
    return [str(document.relative_to(ROOT)) for document in documents]


@functools.cache
def files():
    return [f"/{path.relative_to(ROOT)}" for top in FOLDERS for kind in SOURCES for path in (ROOT / top).rglob(kind)]


@functools.cache
def source():
    """All code of ours, to look names up in."""
    tops = ("actors", "cluster", "loadtest", "protos/sightline/v1")
    return "\n".join(
        path.read_text(encoding="utf-8")
        for top in tops
        for kind in ("*.py", "*.proto")
        for path in sorted((ROOT / top).rglob(kind))
        if not path.stem.endswith(("_pb2", "_grpc"))
    )


def spelled_out(path):
    """``a/{b,c}.py`` -> ``a/b.py``, ``a/c.py``."""
    if not (found := re.search(r"\{([^{}]+)\}", path)):
        return [path]
    return [
        each for part in found[1].split(",") for each in spelled_out(path[: found.start()] + part + path[found.end() :])
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_lead_somewhere(document):
    broken = []
    for link in links(read(document)):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(read(target))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", HANDWRITTEN, ids=names(HANDWRITTEN))
def test_files_that_are_named_exist(document):
    """With a folder of ours in front from the root on, else anywhere; ``docs/x.md`` in the text as well."""
    text = read(document)
    named = [code for code in inline(text) if re.fullmatch(r"[\w.{},*/-]+", code)]
    rooted = [code for code in named if code.split("/")[0] in FOLDERS and "/" in code]
    missing = [path for code in rooted for path in spelled_out(code) if not list(ROOT.glob(path))]
    bare = [code for code in named if re.search(r"\.(py|js|proto)$", code) and code not in rooted]
    missing += [code for code in bare if not any(file.endswith(f"/{code}") for file in files())]
    missing += [path for path in re.findall(r"(?<![\w/`])docs/\w+\.md", text) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("document", HANDWRITTEN, ids=names(HANDWRITTEN))
def test_code_that_is_named_exists(document):
    """``Class.attribute``, ``function(...)`` and names of two words and more, those of other systems we use too."""
    missing = []
    for code in inline(read(document)):
        if code.startswith("Dockerfile."):
            continue
        if found := re.match(r"([A-Z]\w+)\.([a-z]\w*)", code):
            wanted = [rf"(class|message|service) {found[1]}\b", rf"(\bdef {found[2]}\b|\b{found[2]}:|\b{found[2]} = )"]
        elif found := re.match(r"([a-z]\w+)\(", code):
            wanted = [rf"\bdef {found[1]}\b"]
        elif re.fullmatch(r"([A-Z][a-z]+){2,}", code):
            wanted = [rf"(?i:\b{code}\b)"]
        else:
            continue
        missing += [code for pattern in wanted if not re.search(pattern, source())]
    assert missing == []


def is_key(path):
    """Whether a dotted name is a key of the configuration."""
    model = SightlineConfig
    for part in path.split("."):
        fields = getattr(model, "model_fields", None)
        if fields is None or part not in fields:
            return False
        kinds = [fields[part].annotation, *getattr(fields[part].annotation, "__args__", ())]
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return True


@pytest.mark.parametrize("document", HANDWRITTEN, ids=names(HANDWRITTEN))
def test_configurations_that_a_page_shows_load(document, monkeypatch):
    """Blocks of YAML whose keys are sections of the configuration."""
    for block in blocks(read(document), "yaml"):
        tree = read_yaml(block, document.name).data
        if not tree.keys() <= SightlineConfig.model_fields.keys():
            continue
        for name in re.findall(r"\$\{(\w+)\}", block):
            monkeypatch.setenv(name, "secret")
        if "cameras" in tree:
            # A camera without questions of its own is asked the cluster's.
            tree.setdefault("questions", [{"id": "person", "text": "Is anyone there?"}])
        load_tree(tree, document.name)


def is_value(path):
    """Whether a dotted name is a value of the Helm chart."""
    found = yaml.safe_load((ROOT / "deploy/helm/sightline/values.yaml").read_text())
    for part in path.split("."):
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("document", HANDWRITTEN, ids=names(HANDWRITTEN))
def test_configuration_keys_that_are_named_exist(document):
    """Of the configuration or of the chart; a module, or an entry point of pyproject.toml, may look like one."""
    sections = set(SightlineConfig.model_fields)
    project = (ROOT / "pyproject.toml").read_text()
    keys = [code.split(":")[0] for code in inline(read(document))]
    keys = [key for key in keys if re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", key) and key.split(".")[0] in sections]
    keys = [key for key in keys if not re.search(r"\.(py|js|json|jsonl|sqlite|yaml|proto|io)$", key)]
    unknown = [key for key in keys if not is_key(key) and not is_value(key) and not is_module(key)]
    assert [key for key in unknown if f'."{key}"]' not in project] == []


@pytest.mark.parametrize("document", HANDWRITTEN, ids=names(HANDWRITTEN))
def test_metrics_that_are_named_exist(document):
    """Prometheus' own endings are not part of a metric's name in the code."""
    named = set(re.findall(r"\bsightline_[a-z_]+[a-z]\b", " ".join(inline(read(document)))))
    named -= {
        "sightline_control",
        "sightline_gateway",
        "sightline_decoder",
        "sightline_replica",
    }  # Ray resources of the chart.
    assert [name for name in sorted(named) if f'"{name.removesuffix("_total")}' not in source()] == []


def test_every_page_is_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        near = {(page.parent / link.partition("#")[0]).resolve() for link in links(read(page))}
        ahead += [other for other in near if other.suffix == ".md" and other not in reached]
    assert [document for document in DOCUMENTS if document.resolve() not in reached] == []
