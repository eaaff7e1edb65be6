"""Every command that the documentation or a help text shows exists, with the options it is given."""

import importlib.util
import re
from pathlib import Path

import pytest
from doc_parts import DOCUMENTS, ROOT, blocks, command_lines, inline, read, sightline_commands

from actors.cli.app import command
from cluster.lab.bench.harness import BENCHES, IN_CHECKOUT, SUPPORT

CLI = command()
PLACEHOLDER = re.compile(r"[A-Z][A-Z_:]*")


def branches(node, path=()):
    """Every command of the tree with the words that lead to it."""
    yield path, node
    for name, child in getattr(node, "commands", {}).items():
        yield from branches(child, (*path, name))


COMMANDS = {path: node for path, node in branches(CLI) if path}


def fault(words):
    """What is wrong with a command line, or None; values are not looked at."""
    if words[:1] == ["bench"]:
        return bench_fault(words[1:])
    node, context, rest = CLI, CLI.context_class(CLI, info_name="sightline"), list(words)
    while True:
        try:
            _, extra, _ = node.make_parser(context).parse_args(list(rest))
        except Exception as error:
            return str(error)
        if not hasattr(node, "commands"):
            return f"one argument too many: {extra}" if extra else None
        if not extra or PLACEHOLDER.fullmatch(extra[0]):
            return None
        if extra[0] not in node.commands:
            return f"no command {extra[0]!r}"
        node = node.commands[extra[0]]
        context = node.context_class(node, info_name=extra[0], parent=context)
        rest = extra[1:]


def bench_fault(words):
    """Benches are not imported: what they measure takes seconds to load."""
    if not words or PLACEHOLDER.fullmatch(words[0]):
        return None
    if words[0] not in BENCHES:
        return f"no bench {words[0]!r}"
    folder = ROOT / "cluster" / "lab" / "bench"
    name = words[0]
    if name in IN_CHECKOUT:
        name, folder = IN_CHECKOUT[name], SUPPORT
    texts = [file.read_text() for file in (*folder.glob(f"{name}*.py"), *(folder / name).rglob("*.py"))]
    # What it shares with others is in a module beside it.
    shared = {
        folder / f"{name}.py" for text in texts for name in re.findall(r"from cluster\.lab\.bench\.(\w+) import", text)
    }
    texts += [file.read_text() for file in shared if file.exists()]
    known = {"--json", "--help", *re.findall(r"add_argument\(\s*\"(-[\w-]+)\"", "".join(texts))}
    given = [word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
    unknown = [option for option in given if option not in known]
    return f"no option {unknown[0]}" if unknown else None


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(document.relative_to(ROOT)) for document in DOCUMENTS])
def test_commands_of_a_page_can_be_given(document):
    commands = sightline_commands(read(document))
    assert [(words, wrong) for words in commands if (wrong := fault(words)) is not None] == []


def test_wrong_commands_would_be_found():
    page = (
        "Try `sightline memory forget gate`.\n\n```sh\nX=1 .venv/bin/sightline serve --nothing > x | head  # why\n```\n"
    )
    first, second = sightline_commands(page)
    assert first == ["serve", "--nothing"]
    assert "--nothing" in fault(first)
    assert "too many" in fault(second)
    assert "no command" in fault(["srve"])
    assert "no option" in fault(["bench", "soak", "--hours", "2"])


def test_make_targets_of_a_page_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        text = read(document)
        scripts = [*blocks(text, "sh"), *(code for code in inline(text) if code.startswith("make "))]
        lines = [words for script in scripts for words in command_lines(script)]
        named = {word for words in lines if words[:1] == ["make"] for word in words[1:2] if "=" not in word}
        assert named <= targets, document


def test_modules_that_a_page_runs_exist():
    for document in DOCUMENTS:
        for module in re.findall(r"python -m ((?:cluster|actors|loadtest)[\w.]*)", read(document)):
            assert importlib.util.find_spec(module) is not None, (document, module)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_an_example_that_can_be_given(path):
    """Of each command; a group has the examples of its commands."""
    node = COMMANDS[path]
    examples = [line.strip() for line in (node.help or "").splitlines() if re.match(r"\s*(\[bold\])?\$ ", line)]
    examples = [re.sub(r"\[/?\w+\]", "", line).lstrip("$ ") for line in examples]
    assert node.help, "says nothing"
    assert examples or hasattr(node, "commands") or path == ("version",)
    for example in examples:
        for words in command_lines(example):
            if words[:1] == ["sightline"]:
                assert fault(words[1:]) is None, example


def test_configurations_that_a_page_names_exist():
    for document in DOCUMENTS:
        for words in sightline_commands(read(document)):
            named = [Path(word) for word in words if word.startswith(("configs/", "deploy/"))]
            assert [path for path in named if not (ROOT / path).exists()] == [], document
