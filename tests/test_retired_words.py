"""Identifiers contain no word of `retired_words.txt`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cluster", "kernels", "loadtests", "penstock", "protos", "router", "training", "workers")
PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def retired() -> dict[str, set[str]]:
    """Return the retired words, each with the identifiers that may contain the word."""
    words = {}
    for line in (ROOT / "tests" / "retired_words.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            word, _, kept = line.partition(":")
            words[word] = {each.strip() for each in kept.split(",")}
    return words


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines or assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.arg(name):
                yield name
            case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def retired_in(name: str, words: dict[str, set[str]]) -> list[str]:
    """Return the retired words in an identifier, except words that list it as an exception."""
    pieces = {each.lower() for each in PIECE.findall(name)}
    return sorted(word for word in pieces & words.keys() if name not in words[word])


def test_pieces_are_found_between_underscores_and_capitals() -> None:
    words = {"seat": {"car_seat"}, "road": set()}
    assert retired_in("free_seat", words) == ["seat"]
    assert retired_in("SeatRoad", words) == ["road", "seat"]
    assert retired_in("_ROAD", words) == ["road"]
    assert retired_in("car_seat", words) == []
    assert retired_in("seating", words) == []


def test_no_identifier_has_a_retired_word() -> None:
    words = retired()
    assert words
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            names = {path.stem, path.parent.name, *identifiers(ast.parse(path.read_text()))}
            found += [
                f"{path.relative_to(ROOT)}: {name} has {word!r}"
                for name in sorted(names)
                for word in retired_in(name, words)
            ]
    assert found == []
