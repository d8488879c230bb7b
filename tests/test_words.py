"""Plain words: no sentence of help, messages, docs, docstrings and comments has one of these patterns."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("apps", "bench", "calib", "edgevlm", "engines", "examples", "export", "runtime")
BANNED = {  # a pattern, and what to write in its place
    r"(?:^|[.:;!?] )Of (?!course)": "name the thing first",
    r"\b(?:is|are|was|were|be|been) told\b": "gets, receives, is distinguished",
    r"\b(?:is|are|was|were|be|been) said\b": "is logged, reported, returned",
    r"\b[Tt]old apart\b": "distinguished",
    r"\bwho (?:had|has)\b": "name them: the client, the owner",
    r"\b[Ss]tands? (?!for\b|in for\b)\w+": "is",
    r"\banew\b": "again",
    r"\bof late\b": "recently",
    r"\b(?:go|goes|went|gone) on\b": "continue",
    r"\b[Ee]very so often\b": "at intervals",
    r"\bso (?:long|many|late) (?!as\b|that\b)\w+": "a duration, this many",
    r"\bnobody\b": "name who does not",
    r"\bwaits? for nobody\b": "does not wait",
    r"(?<!\b[Tt]here )(?<!\bhere )(?<!\banswer )\bis no (?!longer|more\b|less\b|other\b|such\b|\w+er\b)\w+": "is not a",
    r"\bthat there (?:is|are) not\b": "missing, unknown",
    r"\bthat is none\b|\bthat are none\b": "invalid",
    r"\blies? (?:in|at|on|between|beside|under|over)\b": "is",
    r"\b(?:can|could|to) be had\b": "is available",
    r"\bon whose\b": "name the owner",
    r"\b(?:asked|asks?|writes|waits?|takes? it) (?:it )?no more\b": "no longer, stop",
    r"\btoo \w+ an? (?:one|line|budget|name|text)\b": "a name that is too long",
    r"\bwhat there (?:is|are|was)\b": "name it",
    r"\bwhat (?:has|had|have) (?:these|this)\b": "entries with",
    r"\b[Ww]hat comes\b": "name what comes",
    r"\bis another(?:'s| one)\b": "differs",
    r"\b(?:is|are) to be (?:\w+ed|seen|sent|had|zero|forgotten)\b": "must be",
    r"\bnone of it\b(?= is said)": "nothing",
    r"\b[Ss]ee to it\b": "make sure",
    r"\bbegins? alike\b": "start with the same",
    r"\bcannot be looked at\b": "cannot be read",
    r"\bnothing is known of\b": "unknown",
    r"\b(?:thereof|therein|wherein|thereby|whereby|hereby|therefrom)\b": "in it, by which",
    r"\b(?:this|that|one|those|process|thread|folder|cpu|machine|owner|changed) alone\b": "only",
    r"\bleft out is\b": "skipped",
    r"\bwhat is left out\b": "skipped entries",
    r"\bin the like manner\b": "plainly",
    r"\bno whole number\b": "not a multiple",
    r"\bin which case\b|\bas the case may be\b": "then",
    r"\bunless (?:given|set)\b": "by default",
    r"\b(?:process|thread) of (?:its|their) own\b": "a separate process",
    r"\bof equal ones\b": "ties",
    r"\b[Ll]et(?:s|ting)? go of\b": "release, free",
    r"\bhears? of\b": "gets",
    r"\bfor ever\b": "name the time",
    r"\bany more\b": "no longer",
    r"\b(?:says|say) (?:so|why|which|whether|nothing|little|more|how)\b": "prints, names, lists, has the reason",
}
ALLOWED = ()  # at most ten: names and quotations


def python_texts(path):
    """Strings of three words and more, docstrings and comments, with their lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def page_texts(path):
    """The paragraphs of a page, without blocks of code, with their lines."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for found in re.finditer(r"(?:^(?! {4})\S.*\n?|^ {1,3}\S.*\n?)+", text, re.MULTILINE):
        yield text[: found.start()].count("\n") + 1, found[0]


def texts():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from ((path, line, text) for line, text in python_texts(path))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield from ((path, line, text) for line, text in page_texts(path))


def test_no_text_has_a_banned_pattern():
    assert len(ALLOWED) <= 10
    banned = {re.compile(pattern): instead for pattern, instead in BANNED.items()}
    found = []
    for path, line, text in texts():
        plain = " ".join(text.split())
        for pattern, instead in banned.items():
            for match in pattern.finditer(plain):
                around = plain[max(0, match.start() - 40) : match.end() + 30]
                if not any(phrase in around for phrase in ALLOWED):
                    found.append(f"{path.relative_to(ROOT)}:{line}: {around!r} (write: {instead})")
    assert not found, "\n".join(["", *sorted(set(found))])


@pytest.mark.parametrize(
    "text",
    [
        "Of the snapshots of a camera.", "what a late node still writes there, nobody reads", "this is no picture",
        "The sink is told of it.", "It goes on after a restart.", "Times are so long ago.", "as it stands here",
    ],
)  # fmt: skip
def test_a_sentence_of_before_is_found(text):
    assert any(re.search(pattern, text) for pattern in BANNED)
