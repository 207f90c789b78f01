"""The grammar of answers that may call tools: free text, in which each call has the given form.

The text is in Lark's syntax as llguidance reads it. `penstock.common.grammar` adds the rules
`arguments_0`, `arguments_1` and so on: the arguments of each function.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SPACE = "SPACE"
"""Terminal: a little white space, or none."""

NEVER = json.dumps("\0")
"""Expansion that models do not write."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of one or more calls.

    Attributes:
        trigger: text or special token with which they begin.
        rest: what follows, as the expansion of a rule.
        only_first: calls begin only at the start of the answer.
    """

    trigger: str
    rest: str
    only_first: bool = False


class CallGrammar:
    """Writes the parts of a grammar that depend on the functions and on the tokenizer.

    Args:
        names: names of the functions, in the order of the rules of their arguments.
        special_id: returns the id of the special token with a text; None: it is ordinary text.
        special_ids: all special tokens.
    """

    def __init__(
        self,
        names: Sequence[str],
        special_id: Callable[[str], int | None],
        special_ids: Sequence[int],
    ) -> None:
        self._names = names
        self._special_id = special_id
        self._special_ids = special_ids

    # ------------------------------------------------------------ for the formats

    def marker(self, text: str) -> str:
        """Return a marker as a grammar terminal: its special token if it has one, else its text."""
        token = self._special_id(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def each(self, form: Callable[[str, str], str]) -> str:
        """Return the alternatives of all functions; `form` gets a name and its arguments' rule."""
        forms = [form(name, f"arguments_{index}") for index, name in enumerate(self._names)]
        return f"( {' | '.join(forms)} )"

    def members(self, key: str, has_name: bool = False) -> str:
        """Return the members of an object such as `"name": "add", "arguments": {...}`.

        Args:
            key: name of the member with the arguments.
            has_name: whether the text before has the key `name`.
        """

        def form(name: str, arguments: str) -> str:
            value = json.dumps(f'"{name}"')
            begun = "" if has_name else '"\\"name\\""'
            named = f'{begun} {SPACE} ":" {SPACE} {value} {SPACE} "," {SPACE}'
            return f'{named} "\\"{key}\\"" {SPACE} ":" {SPACE} {arguments}'

        return self.each(form)

    def call(self, key: str = "arguments") -> str:
        """Return a call as a JSON object."""
        return f'"{{" {SPACE} {self.members(key)} {SPACE} "}}"'

    def calls(self, key: str = "arguments") -> str:
        """Return calls as JSON objects with commas between them."""
        call = self.call(key)
        return f'{call} ( {SPACE} "," {SPACE} {call} )* {SPACE}'

    # ------------------------------------------------------------ the whole grammar

    def text(self, forms: Sequence[CallForm], tags: tuple[str, str] | None, is_open: bool) -> str:
        """Return the grammar.

        Args:
            forms: the forms of calls.
            tags: start and end tag of the model's reasoning, in which nothing is a call; None: it
                does not reason.
            is_open: whether the answer begins with reasoning, without the start tag.
        """
        triggers, known = [form.trigger for form in forms], tags or ()
        body, rules = self._body(forms, self._special(known, (*triggers, *known)))
        start = body
        if tags is not None:
            begin, end = tags
            # A call cannot begin within reasoning.
            inside = f"( TEXT {self._special((*triggers, begin), (*triggers, *tags))} )* TEXT"
            # A special token may follow any text, since lexemes of white space and text exclude
            # each other; a text must be at the start of the answer.
            lead = SPACE if self._special_id(begin) is None else "TEXT"
            rules += self._triggered("reasoning_begin", lead, begin, "")
            rules += self._triggered("reasoning_end", inside, end, "")
            opened = "" if is_open else "reasoning_begin "
            start = f"{opened}reasoning_end {body} | {opened}{inside}"
            start += "" if is_open else f" | {body}"
        head = ("%llguidance {}", "TEXT: /(.|\\n)*/", f"{SPACE}: /[ \\t\\r\\n]{{0,8}}/")
        return "\n".join((*head, *rules, f"start: {start}")) + "\n"

    def _body(self, forms: Sequence[CallForm], special: str) -> tuple[str, list[str]]:
        """Return the expansion for text with calls, and the rules that it uses.

        Args:
            forms: the forms of calls.
            special: expansion for a special token in the text.
        """
        rules: list[str] = []
        firsts: list[str] = []
        segments = [f"TEXT {special}"]
        for index, form in enumerate(forms):
            name = f"calls_{index}"
            lead = SPACE if form.only_first else "TEXT"
            rules += self._triggered(name, lead, form.trigger, form.rest)
            (firsts if form.only_first else segments).append(name)
        body = f"( {' | '.join(segments)} )* TEXT"
        return (f"( {' | '.join((*firsts, body))} )" if firsts else body), rules

    def _triggered(self, name: str, lead: str, trigger: str, rest: str) -> list[str]:
        """Return the rules of `name`: `lead`, the trigger as soon as it comes, then `rest`."""
        token = self._special_id(trigger)
        if token is not None:
            return [f"{name}: {lead} <[{token}]> {rest}"]
        *others, last = lead.rsplit(" ", 1)
        head = f"{name}_head[lazy]: {last} {self.marker(trigger)}"
        return [head, f"{name}: {' '.join(others)} {name}_head {rest}"]

    def _special(self, allowed: Sequence[str], markers: Sequence[str]) -> str:
        """Return the expansion for a special token in text.

        Args:
            allowed: the markers that are allowed.
            markers: all markers that are used elsewhere. Their tokens are lexemes of their own, as
                the lexer takes only one of several lexemes with the same token.
        """
        own = {self._special_id(marker) for marker in markers}
        others = sorted(set(self._special_ids) - own)
        found = [f"<[{','.join(map(str, others))}]>"] if others else []
        ids = [self._special_id(marker) for marker in allowed]
        found += [f"<[{token}]>" for token in ids if token is not None]
        return f"( {' | '.join(found)} )" if found else NEVER
