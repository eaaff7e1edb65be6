"""The documentation as its tests read it: blocks of code, code in the text, links, headings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")])

FENCE = re.compile(r"^([ \t]*)```(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


def read(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return FENCE.sub("", text)


def blocks(text: str, language: str) -> list[str]:
    return [match[3] for match in FENCE.finditer(text) if match[2] == language]


def inline(text: str) -> list[str]:
    """What stands between backticks in a paragraph, lines joined."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def links(text: str) -> list[str]:
    """Targets of links and pictures that are not on the web."""
    found = re.findall(r"\]\(([^()\s]+)\)", prose(text))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+[ \t]+(.+?)[ \t]*$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while (name if not number else f"{name}-{number}") in found:
            number += 1
        found.add(name if not number else f"{name}-{number}")
    return found


def command_lines(script: str) -> Iterator[list[str]]:
    """The commands of a shell script, one list of words for each; comments, redirections and variables' values go."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.replace("…", " "), posix=True, punctuation_chars="|&;><")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        redirected = False
        for word in lexer:
            if set(word) <= set("|&;"):
                yield words
                words = []
            elif set(word) <= set("<>&"):
                redirected = True
            elif redirected:
                redirected = False
            elif words or not re.match(r"\w+=", word):
                words.append(word)
        yield words


def sightline_commands(text: str) -> list[list[str]]:
    """What a page tells the reader to give to ``sightline``, in blocks and in the text."""
    scripts = [*blocks(text, "sh"), *(code for code in inline(text) if code.startswith("sightline "))]
    found = [words for script in scripts for words in command_lines(script) if words]
    return [words[1:] for words in found if words[0].rsplit("/", 1)[-1] == "sightline"]
