"""Checks structured outputs with thousands of random JSON Schemas.

`python -m penstock.loadtests.micro.schemas` draws random schemas from `KEYWORDS`. The median schema
has 12 properties, and objects and arrays are nested up to four deep. Each schema is checked in
three ways with the tokenizer of the bundled model:

- Random answer: a token is drawn from each mask, until the end token is allowed or the answer is
  too long. An answer that ends must be valid by `jsonschema`.
- Valid document: the masks must accept all of it. Otherwise the third check would prove nothing.
- Invalid document: a valid document in which a value is made wrong, or a property is renamed or
  removed. The masks must refuse a token that begins at the end of the mistake or earlier.

The exit code is 1 if a check fails.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeAlias

import jsonschema
import numpy as np

from penstock.common.grammar.matcher import CompiledGrammar, GrammarVocabulary, num_words
from penstock.common.structured_outputs import json_schema
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL, MeasurementFailed, run

Schema: TypeAlias = dict[str, Any]

KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "anyOf", "$ref", "$defs"),
)
MAX_DEPTH = 4
END = 2  # id of the end token of the bundled model
WORDS = ("red", "Grün", "a b", 'q"t', "x\\y", "ligne\n", "", "日本", "on/off", "7")
PATTERNS = {  # for each pattern, a matching string and one that does not match
    "^[A-Z]{3}-[0-9]{2,4}$": ("ABC-123", "ABC_123"),
    "^(yes|no|maybe)$": ("maybe", "never"),
    r"^\d{4}-\d{2}$": ("2026-11", "2026/11"),
    "^[a-f0-9]{8}$": ("0badcafe", "0badcafg"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the check."""

    schemas: int = option(2000, "number of schemas")
    first: int = option(0, "seed of the first schema; each further one has the next seed")
    max_tokens: int = option(1500, "tokens after which an answer is given up")
    save_json: str = option("", "write the results to this file")


@dataclass(slots=True)
class Drawn:
    """Draws a random schema and a valid document.

    Attributes:
        wrong: for the path of each value in the document, a value that is invalid there.
    """

    numbers: random.Random
    shared: Schema = field(default_factory=dict)  # `$defs`
    num_properties: int = 0
    depth: int = 0
    wrong: dict[tuple[str | int, ...], Any] = field(default_factory=dict)

    def object(self, path: tuple[str | int, ...], depth: int) -> tuple[Schema, Any]:
        """Return a schema of an object and a valid object with all its properties."""
        numbers, most = self.numbers, 9 if depth == 1 else 4
        self.depth = max(self.depth, depth)
        properties, document = dict[str, Schema](), dict[str, Any]()
        for index in range(numbers.randint(4 if depth == 1 else 1, most)):
            name = f"{numbers.choice(('id', 'name', 'größe', 'x y', 'n'))}{index}"
            properties[name], document[name] = self.value((*path, name), depth)
            self.num_properties += 1
        schema: Schema = {"type": "object", "properties": properties}
        schema |= {"required": list(properties), "additionalProperties": False}
        return schema, document

    def value(self, path: tuple[str | int, ...], depth: int) -> tuple[Schema, Any]:
        """Return a random schema and a valid value for it.

        An invalid value for the same path is recorded in `wrong`.
        """
        if depth < MAX_DEPTH and self.numbers.random() < 0.4:
            nested = self.numbers.choice((self.object, self._array))
            self.wrong[path] = self.numbers.choice((17, "text", None, True))
            return nested(path, depth + 1)
        schema, value, wrong = self.numbers.choice((self._number, self._text, self._choice))()
        self.wrong[path] = wrong
        wrapped = self.numbers.random()
        if wrapped < 0.1:
            name = f"shared{len(self.shared)}"
            self.shared[name] = schema
            return {"$ref": f"#/$defs/{name}"}, value
        if wrapped < 0.2:
            return {"anyOf": [schema, {"type": "null"}]}, value
        return schema, value

    def _array(self, path: tuple[str | int, ...], depth: int) -> tuple[Schema, Any]:
        self.depth = max(self.depth, depth)
        least = self.numbers.randint(1, 2)
        items, first = self.value((*path, 0), depth)
        schema = {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
        return schema, [first] * least

    def _number(self) -> tuple[Schema, Any, Any]:
        low = self.numbers.randint(-500, 500)
        high = low + self.numbers.randint(1, 900)
        kind = self.numbers.choice(("integer", "number"))
        if self.numbers.random() < 0.5:
            bounds = {"minimum": low, "maximum": high}
            return {"type": kind, **bounds}, high, self.numbers.choice((low - 1, high + 1, "4"))
        bounds = {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        return {"type": kind, **bounds}, low, self.numbers.choice((low - 1, high + 1, [low]))

    def _text(self) -> tuple[Schema, Any, Any]:
        if self.numbers.random() < 0.5:
            pattern = self.numbers.choice(list(PATTERNS))
            value, wrong = PATTERNS[pattern]
            return {"type": "string", "pattern": pattern}, value, wrong
        least = self.numbers.randint(1, 5)
        bounds = {"minLength": least, "maxLength": least + 8}
        mistakes: tuple[Any, ...] = ("ü" * (least - 1), "y" * (least + 9), 3.5)
        return {"type": "string", **bounds}, "日" * least, self.numbers.choice(mistakes)

    def _choice(self) -> tuple[Schema, Any, Any]:
        kind = self.numbers.randrange(3)
        if kind == 0:
            return {"type": "boolean"}, self.numbers.random() < 0.5, "true"
        values = self.numbers.sample(WORDS, 4)
        if kind == 1:
            return {"const": values[0]}, values[0], values[1]
        return {"enum": [*values[:3], 12]}, values[2], values[3]


def draw(seed: int) -> tuple[Schema, Any, Drawn]:
    """Return a random schema, a valid document, and the `Drawn` that made them."""
    drawn = Drawn(random.Random(seed))
    schema, document = drawn.object((), 1)
    if drawn.shared:
        schema["$defs"] = drawn.shared
    return schema, document, drawn


def with_value(document: Any, path: Sequence[str | int], value: Any) -> tuple[str, int]:
    """Return the JSON text of `document` with `value` at `path`, and the end index of `value`."""
    if not path:
        text = json.dumps(value, ensure_ascii=False)
        return text, len(text)
    pieces, end = list[str](), -1
    is_object = isinstance(document, dict)
    for key, each in document.items() if is_object else enumerate(document):
        name = f"{json.dumps(key, ensure_ascii=False)}: " if is_object else ""
        text, own_end = json.dumps(each, ensure_ascii=False), -1
        if key == path[0] and end < 0:
            text, own_end = with_value(each, path[1:], value)
            end = 1 + sum(len(piece) + 2 for piece in pieces) + len(name) + own_end
        pieces.append(name + text)
    opening, closing = "{}" if is_object else "[]"
    return opening + ", ".join(pieces) + closing, end


def mistake(document: dict[str, Any], drawn: Drawn) -> tuple[str, int]:
    """Return the JSON text of an invalid document, and the index of the end of the mistake.

    The mistake is a missing or renamed property of the outer object, or a wrong value anywhere. An
    answer must have its properties in the order of the schema. After a missing property, the
    mistake is therefore the name of the next property.
    """
    numbers, names = drawn.numbers, list(document)
    chosen, kind = numbers.randrange(len(names)), numbers.random()
    if kind < 0.7:
        path = numbers.choice(list(drawn.wrong))
        return with_value(document, path, drawn.wrong[path])
    changed = {
        ("other" if kind < 0.85 and index == chosen else name): document[name]
        for index, name in enumerate(names)
        if kind < 0.85 or index != chosen
    }
    wrong_name = "other" if kind < 0.85 else (*names, "")[chosen + 1]
    text = json.dumps(changed, ensure_ascii=False)
    if not wrong_name:  # the last property is missing, so that the closing brace is the mistake
        return text, len(text)
    name = json.dumps(wrong_name, ensure_ascii=False)
    before = list(changed)[: list(changed).index(wrong_name)]
    start = len(json.dumps({key: changed[key] for key in before}, ensure_ascii=False)) - 1
    return text, text.index(f"{name}:", start) + len(name)


class Checker:
    """Runs the checks of one schema after the other, with one vocabulary."""

    def __init__(self, max_tokens: int) -> None:
        self.tokenizer = ModelTokenizer(SHIPPED_MODEL)
        self.vocabulary = GrammarVocabulary(self.tokenizer, self.tokenizer.vocab_size, [END])
        self.max_tokens = max_tokens
        texts = [self.tokenizer.token_bytes.bytes_of(t) for t in range(self.tokenizer.vocab_size)]
        self._closing = np.array([text[:1] in b'",]}:' and bool(text) for text in texts])

    def failures(self, seed: int) -> Iterator[str]:
        """Yield a line for each failed check of the schema of `seed`.

        Yields "" after these lines if the random answer ended.
        """
        schema, document, drawn = draw(seed)
        validator = jsonschema.Draft202012Validator(schema)
        grammar = self.vocabulary.compile(json_schema(schema))
        numbers = random.Random(seed)
        text = self.random_answer(grammar, numbers)
        if text is not None and not validator.is_valid(json.loads(text)):
            yield f"the token masks allowed an answer that does not match the schema: {text}"
        right = json.dumps(document, ensure_ascii=False)
        if not validator.is_valid(document):
            yield (
                "the check itself is wrong: a document that it drew as valid does not match the "
                f"schema: {right}"
            )
        if (at := self.refused_at(grammar, right)) is not None:
            yield f"the token masks refuse a valid document at character {at}: {right}"
        wrong, end = mistake(document, drawn)
        if validator.is_valid(json.loads(wrong)):
            yield (
                "the check itself is wrong: a document that it drew as invalid matches the "
                f"schema: {wrong}"
            )
        at = self.refused_at(grammar, wrong)
        if at is None or at > end:
            yield (
                "the token masks must refuse this document at its wrong value, which ends at "
                f"character {end}, but refused it at {at} (None: not at all): {wrong}"
            )
        if text is not None:
            yield ""

    def random_answer(self, grammar: CompiledGrammar, numbers: random.Random) -> str | None:
        """Draw tokens until the end token is allowed.

        Return the text, or None if it is too long.
        """
        matcher, tokens = grammar.matcher(), list[int]()
        words = np.zeros(num_words(self.tokenizer.vocab_size), np.int32)
        while len(tokens) < self.max_tokens:
            matcher.fill(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            allowed = bits[: len(self._closing)].astype(np.bool_)
            if allowed[END]:
                return self.tokenizer.token_bytes.decode(tokens)
            closing = allowed & self._closing
            # Prefer tokens that close a value, so that answers end before `max_tokens`.
            if closing.any() and numbers.random() < 0.5:
                allowed = closing
            token = int(numbers.choice(np.flatnonzero(allowed)))
            if not matcher.advance([token]):
                raise MeasurementFailed(
                    f"the matcher refuses token {token}, which its mask allows, after {tokens}"
                )
            tokens.append(token)
        return None

    def refused_at(self, grammar: CompiledGrammar, text: str) -> int | None:
        """Return the character index at which the masks refuse `text`, or None if they accept it.

        The index is that of the first character of the refused token. The end token must be
        accepted after the text. If only the end token is refused, the index is the length of the
        text.
        """
        matcher, at = grammar.matcher(), 0
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if not matcher.advance([token]):
                return len(text.encode()[:at].decode(errors="ignore"))
            at += len(self.tokenizer.token_bytes.bytes_of(token))
        words = np.zeros(num_words(self.tokenizer.vocab_size), np.int32)
        matcher.fill(words)
        return None if words[END // 32] >> END % 32 & 1 else len(text)


async def check(options: Options) -> dict[str, Any]:
    """Check all schemas and print the results. Raise MeasurementFailed if a check failed."""
    checker, num_failed, num_ended = Checker(options.max_tokens), 0, 0
    properties, depths = list[int](), list[int]()
    for seed in range(options.first, options.first + options.schemas):
        schema, _, drawn = draw(seed)
        properties.append(drawn.num_properties)
        depths.append(drawn.depth)
        for failure in checker.failures(seed):
            if not failure:
                num_ended += 1
                continue
            num_failed += 1
            print(f"schema {seed}: {failure}\n  {json.dumps(schema, ensure_ascii=False)}")
    figures = {
        "schemas": options.schemas,
        "failed": num_failed,
        "ended": num_ended,
        "median_properties": median(properties),
        "most_properties": max(properties),
        "median_depth": median(depths),
        "most_depth": max(depths),
    }
    print(json.dumps(figures))
    if num_failed:
        raise MeasurementFailed(
            f"{num_failed} checks of {options.schemas} schemas failed: see the output above"
        )
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, print and save the results, and return the exit code."""
    program, about = "python -m penstock.loadtests.micro.schemas", "Random schemas."
    (options,) = read_flags(program, about, (Options,), arguments)
    return run(lambda: check(options), asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
