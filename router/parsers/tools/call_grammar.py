"""The grammar of answers that may call tools: free text that contains calls of given forms.

The grammar is written in llguidance's variant of Lark's syntax. `penstock.common.grammar` adds the
rules `arguments_0`, `arguments_1` and so on, one for the arguments of each function.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.common.argument_notation import JSON, ArgumentNotation

SPACE = "SPACE"
"""Name of the terminal for at most `MAX_SPACES` characters of white space, or none."""

FIRST = "FIRST"
"""Name of the terminal for text at the start of an answer that `SPACE` does not match."""

NEVER = json.dumps("\0")
"""Expansion that matches only the character NUL, which models do not write."""


WHITE_SPACE, MAX_SPACES = " \t\r\n", 8
"""The characters of `SPACE`, and their maximum number."""


def is_short(space: str) -> bool:
    """Return whether white space is short enough for the terminal `SPACE`."""
    return len(space) <= MAX_SPACES and not space.strip(WHITE_SPACE)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of one or more calls.

    Attributes:
        trigger: text or special token with which the calls begin.
        rest: expansion for the text after the trigger.
        only_first: whether the calls may begin only at the start of the answer.
    """

    trigger: str
    rest: str
    only_first: bool = False


@dataclass(frozen=True, slots=True)
class CallsGrammar:
    """A grammar of answers, and the notation of the arguments of calls in the answers."""

    text: str
    notation: ArgumentNotation = JSON


class CallGrammar:
    """Writes the parts of a grammar that depend on the functions and on the tokenizer.

    Args:
        names: names of the functions, in the order of the rules of their arguments.
        special_id: returns the id of the special token with a given text; None if there is none.
        special_ids: ids of all special tokens.
        is_parallel: whether an answer may have several calls; if not, it ends after one call.

    Attributes:
        rules: the rules that the returned expansions use.
    """

    def __init__(
        self,
        names: Sequence[str],
        special_id: Callable[[str], int | None],
        special_ids: Sequence[int],
        is_parallel: bool = True,
    ) -> None:
        self.is_parallel = is_parallel
        self.rules: list[str] = []
        self._names = names
        self._special_id = special_id
        self._special_ids = special_ids

    # ------------------------------------------------------------ for the formats

    def marker(self, text: str) -> str:
        """Return a marker as a grammar terminal: its special token if it has one, else its text."""
        token = self._special_id(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def each(self, form: Callable[[str, str], str]) -> str:
        """Add a rule with one alternative per function; return the name of the rule.

        `form` is called with the name of a function and the rule of its arguments.
        """
        rule = f"each_{len(self.rules)}"
        forms = [form(name, f"arguments_{index}") for index, name in enumerate(self._names)]
        self.rules.append(f"{rule}: {' | '.join(forms)}")
        return rule

    def more(self, expansion: str) -> str:
        """Return `expansion` as a repeatable part; empty if an answer may have only one call."""
        return f"( {expansion} )*" if self.is_parallel else ""

    def firsts(self, trigger: Callable[[str], str], rest: str) -> list[CallForm]:
        """Return one form per function, for calls that begin the answer.

        Args:
            trigger: returns the text that begins a call of the function with a given name.
            rest: expansion for the text after the arguments.
        """
        return [
            CallForm(trigger(name), f"arguments_{index} {rest}", only_first=True)
            for index, name in enumerate(self._names)
        ]

    def is_special(self, text: str) -> bool:
        """Return whether the vocabulary has a special token for a marker."""
        return self._special_id(text) is not None

    def members(self, key: str, has_name: bool = False) -> str:
        """Return the members of an object such as `"name": "add", "arguments": {...}`.

        Args:
            key: name of the member with the arguments.
            has_name: whether the text before the members already contains the key `name`.
        """

        def form(name: str, arguments: str) -> str:
            value = json.dumps(f'"{name}"')
            begun = "" if has_name else '"\\"name\\""'
            named = f'{begun} {SPACE} ":" {SPACE} {value} {SPACE} "," {SPACE}'
            return f'{named} "\\"{key}\\"" {SPACE} ":" {SPACE} {arguments}'

        return self.each(form)

    def call(self, key: str = "arguments") -> str:
        """Return the expansion for a call that is a JSON object."""
        return f'"{{" {SPACE} {self.members(key)} {SPACE} "}}"'

    def calls(self, key: str = "arguments") -> str:
        """Return the expansion for calls that are JSON objects with commas between them."""
        call = self.call(key)
        others = self.more(f'{SPACE} "," {SPACE} {call}')
        return f"{call} {others} {SPACE}"

    # ------------------------------------------------------------ the whole grammar

    def text(self, forms: Sequence[CallForm], tags: tuple[str, str] | None, is_open: bool) -> str:
        """Return the grammar.

        Args:
            forms: the forms of calls.
            tags: start and end tag of the model's reasoning, which contains no calls; None if the
                model has no reasoning.
            is_open: whether the answer begins with reasoning, without the start tag.
        """
        triggers, known = [form.trigger for form in forms], tags or ()
        special = self._special(known, (*triggers, *known))
        rules = self._calls(forms, "calls", "TEXT")
        body = self._body(forms, "calls", f"TEXT {special}")
        start = body
        if tags is not None:
            begin, end = tags
            # Text within reasoning, where no call can begin.
            inside = f"( TEXT {self._special((*triggers, begin), (*triggers, *tags))} )* TEXT"
            rules += self._triggered("reasoning_begin", SPACE, begin, "")
            rules += self._triggered("reasoning_end", inside, end, "")
            opened = "" if is_open else "reasoning_begin "
            start = f"{opened}reasoning_end {body} | {opened}{inside}"
            if not is_open and self._special_id(begin) is None:
                start += f" | {body}"
            elif not is_open:
                rules += self._calls(forms, "first_calls", f"( {FIRST} | {SPACE} )")
                start += f" | {self._after_first(forms, known, special, body)}"
        head = ("%llguidance {}", "TEXT: /(.|\\n)*/", f"{SPACE}: /[ \\t\\r\\n]{{0,{MAX_SPACES}}}/")
        first = f"{FIRST}: /[ \\t\\r\\n]*[^ \\t\\r\\n](.|\\n)*|[ \\t\\r\\n]{{9,}}/"
        return "\n".join((*head, first, *self.rules, *rules, f"start: {start}")) + "\n"

    def _after_first(
        self, forms: Sequence[CallForm], known: Sequence[str], special: str, body: str
    ) -> str:
        """Return the expansion for answers that do not begin with reasoning.

        The start tag of reasoning is a special token. When a special token comes after white space,
        the lexer must be in exactly one terminal. Text at the start of an answer therefore has the
        terminals `FIRST` and `SPACE` of its own. Reasoning may follow only `SPACE`.
        """
        triggers = [form.trigger for form in forms]
        others = self._special(known[1:], (*triggers, *known))
        texts = f"{FIRST} {special} | {SPACE} {others}"
        firsts = [f"first_calls_{i}" for i, _ in enumerate(forms)]
        loose = [name for name, form in zip(firsts, forms, strict=True) if not form.only_first]
        only = [name for name, form in zip(firsts, forms, strict=True) if form.only_first]
        if self.is_parallel:
            begun = [f"( {' | '.join((*loose, texts))} ) {body}"]
        else:
            begun = [f"( {texts} ) {body}", f"( {' | '.join(loose)} ) {SPACE}"]
        return " | ".join((*begun, *only, FIRST, SPACE))

    def _body(self, forms: Sequence[CallForm], name: str, text: str) -> str:
        """Return the expansion for text with calls.

        Args:
            forms: the forms of calls.
            name: prefix of the names of their rules.
            text: expansion for text before a special token.
        """
        names = [f"{name}_{index}" for index, _ in enumerate(forms)]
        firsts = [each for each, form in zip(names, forms, strict=True) if form.only_first]
        others = [each for each, form in zip(names, forms, strict=True) if not form.only_first]
        if self.is_parallel:
            body = f"( {' | '.join((text, *others))} )* TEXT"
        else:
            body = f"( {text} )* ( TEXT | ( {' | '.join(others)} ) {SPACE} )"
        return f"( {' | '.join((*firsts, body))} )" if firsts else body

    def _calls(self, forms: Sequence[CallForm], name: str, lead: str) -> list[str]:
        """Return the rules for calls of these forms, each preceded by text."""
        rules: list[str] = []
        for index, form in enumerate(forms):
            before = SPACE if form.only_first else lead
            if self._special_id(form.trigger) is None and not form.only_first:
                before = "TEXT"
            rules += self._triggered(f"{name}_{index}", before, form.trigger, form.rest)
        return rules

    def _triggered(self, name: str, lead: str, trigger: str, rest: str) -> list[str]:
        """Return the rules for `name`: text that matches `lead`, then the trigger, then `rest`."""
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
            markers: all markers that the grammar uses by themselves. The token of each of them must
                be a lexeme of its own: if several lexemes contain a token, the lexer uses only one
                of them.
        """
        own = {self._special_id(marker) for marker in markers}
        others = sorted(set(self._special_ids) - own)
        found = [f"<[{','.join(map(str, others))}]>"] if others else []
        ids = [self._special_id(marker) for marker in allowed]
        found += [f"<[{token}]>" for token in ids if token is not None]
        return f"( {' | '.join(found)} )" if found else NEVER
