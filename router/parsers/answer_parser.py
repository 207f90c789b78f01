"""Parsing of whole answers: reasoning first, then tool calls in the content."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.router.parsers.form_grammar import (
    SpecialId,
    harmony_form_grammar,
    tagged_form_grammar,
)
from penstock.router.parsers.harmony import HarmonyParser, begins_message
from penstock.router.parsers.harmony_grammar import harmony_grammar
from penstock.router.parsers.parser_names import (
    AUTO,
    HARMONY_REASONING,
    HARMONY_TOOLS,
    NONE,
    REASONING_TAGS,
    call_forms,
    check_reasoning_parser,
    check_tool_parser,
    detect_reasoning_parser,
    detect_tool_parser,
    markers_of,
    new_tool_parser,
)
from penstock.router.parsers.pieces import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    OutputParser,
    Piece,
    merged,
)
from penstock.router.parsers.think import ThinkParser
from penstock.router.parsers.tools.call_grammar import CallGrammar, CallsGrammar
from penstock.router.parsers.tools.forced import NamedCallParser, RequiredCallsParser
from penstock.router.parsers.tools.tool_parameters import ToolParameters

PROMPT_END_TOKENS = 16
"""Number of tokens at the end of a prompt that show whether reasoning has begun."""

CHARS_PER_STEP = 512
"""Longer texts are parsed in steps, because the parser copies its unread text again and again."""


@dataclass(frozen=True, slots=True)
class ParsingOptions:
    """Options of a request for the parsing of its answers.

    Attributes:
        reads_calls: whether the model may call tools.
        is_forced: whether a grammar forces the whole answer to be calls.
        forced_name: function whose arguments form the forced answer. If empty, the answer is an
            array of calls.
        is_parallel: whether calls after the first one are kept.
        shows_reasoning: whether reasoning is kept.
        is_strict: whether a grammar constrains calls that are not forced.
        has_form: whether a grammar sets the form of the whole content. The content then has no
            calls.
        continues_message: whether the answer continues the last message of the prompt.
        tools: the parameters of the request's tools.
    """

    reads_calls: bool = False
    is_forced: bool = False
    forced_name: str = ""
    is_parallel: bool = True
    shows_reasoning: bool = True
    is_strict: bool = False
    has_form: bool = False
    continues_message: bool = False
    tools: ToolParameters = field(default_factory=ToolParameters)


class AnswerParser:
    """A parser of one answer (an `OutputParser`).

    Args:
        first: parser of the reasoning, or of the whole answer if `second` is None.
        second: parser of the content that `first` finds, if any.
        options: options of the request.
    """

    def __init__(
        self, first: OutputParser, second: OutputParser | None, options: ParsingOptions
    ) -> None:
        self._first = first
        self._second = second
        self._options = options

    def feed(self, text: str) -> list[Piece]:
        """Append text; return the pieces that later text cannot change."""
        if len(text) <= CHARS_PER_STEP:
            return self._kept(self._split(self._first.feed(text)))
        pieces: list[Piece] = []
        for start in range(0, len(text), CHARS_PER_STEP):
            pieces += self._split(self._first.feed(text[start : start + CHARS_PER_STEP]))
        return self._kept(pieces)

    def finish(self) -> list[Piece]:
        """Return the pieces of held-back text at the end of the answer."""
        pieces = self._split(self._first.finish())
        if self._second is not None:
            pieces += self._second.finish()
        return self._kept(pieces)

    def _split(self, pieces: list[Piece]) -> list[Piece]:
        second = self._second
        if second is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += second.feed(piece.text) if piece.kind == CONTENT else [piece]
        return found

    def _kept(self, pieces: Sequence[Piece]) -> list[Piece]:
        options = self._options
        if len(pieces) < 2 and options.is_parallel and options.shows_reasoning:
            return list(pieces)
        return merged(
            piece
            for piece in pieces
            if (options.is_parallel or piece.call == 0 or piece.kind not in (CALL, ARGUMENTS))
            and (options.shows_reasoning or piece.kind != REASONING)
        )


class AnswerParsers:
    """Makes the parsers for the answers of a model.

    Args:
        template: source of the model's chat template, or empty without one.
        tools: name of the parser of tool calls, `auto` (by the template) or `none`.
        reasoning: name of the parser of reasoning, `auto` or `none`.

    Raises:
        ValueError: a name is unknown; the message lists all names.

    Attributes:
        tags: the tags around reasoning, or None if the model has no reasoning or no such tags.
    """

    def __init__(self, template: str = "", tools: str = AUTO, reasoning: str = AUTO) -> None:
        check_tool_parser(tools)
        check_reasoning_parser(reasoning)
        self.tools = detect_tool_parser(template) if tools == AUTO else tools
        self.reasoning = detect_reasoning_parser(template) if reasoning == AUTO else reasoning
        tags = None if self.reasoning == NONE else REASONING_TAGS[self.reasoning]
        self.tags = tags
        self._is_harmony = self.reasoning == HARMONY_REASONING
        known = markers_of(HARMONY_TOOLS) if self._is_harmony else ()
        self._reasoning_markers = tags.markers if tags is not None else known

    @property
    def reads_tools(self) -> bool:
        """Whether tool calls of the model can be parsed."""
        return self.tools != NONE

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning of the model can be parsed."""
        return self.reasoning != NONE

    def may_find(self, options: ParsingOptions) -> bool:
        """Return whether answers with these options may contain reasoning or calls."""
        return self._is_harmony or self.new("", options) is not None

    def markers(self, options: ParsingOptions) -> Sequence[str]:
        """Return the texts of special tokens that the parser of an answer reads."""
        is_read = options.reads_calls and self.reads_tools
        return (*self._reasoning_markers, *(markers_of(self.tools) if is_read else ()))

    def grammar(
        self, prompt_end: str, grammar: CallGrammar, continues_message: bool = False
    ) -> CallsGrammar | None:
        """Return the grammar of answers whose calls fit a schema, or None if the format has none.

        Args:
            prompt_end: see `new`.
            grammar: writer of the parts of the grammar.
            continues_message: see `ParsingOptions`.
        """
        if not self.reads_tools:
            return None
        if self._is_harmony or self.tools == HARMONY_TOOLS:
            text = harmony_grammar(grammar, prompt_end)
            return CallsGrammar(text) if text else None
        forms, notation = call_forms(self.tools, grammar)
        tags = self.tags
        if not forms:
            return None
        pair = None if tags is None else (tags.start, tags.end)
        is_open = tags is not None and tags.are_open(prompt_end, continues_message)
        return CallsGrammar(grammar.text(forms, pair, is_open), notation)

    def form_grammar(
        self, prompt_end: str, special_id: SpecialId, continues_message: bool = False
    ) -> str:
        """Return the grammar of answers whose content, after the reasoning, has a given form.

        The grammar is empty if the answer contains no reasoning, so that all of it has the form.

        Args:
            prompt_end: see `new`.
            special_id: see `SpecialId`.
            continues_message: see `ParsingOptions`.
        """
        if self._is_harmony:
            return harmony_form_grammar(special_id) if begins_message(prompt_end) else ""
        tags = self.tags
        if tags is None or tags.are_closed(prompt_end):
            return ""
        is_open = tags.are_open(prompt_end, continues_message)
        return tagged_form_grammar(tags, is_open, special_id)

    def new(self, prompt_end: str, options: ParsingOptions) -> OutputParser | None:
        """Return the parser of one answer, or None if the whole answer is content.

        Args:
            prompt_end: text of the prompt's last `PROMPT_END_TOKENS` tokens, with special tokens.
            options: options of the request.
        """
        if options.is_forced:  # the grammar of forced calls allows no reasoning
            name = options.forced_name
            return AnswerParser(
                NamedCallParser(name) if name else RequiredCallsParser(), None, options
            )
        reads_calls = options.reads_calls and self.reads_tools and not options.has_form
        if self._is_harmony and options.has_form and not begins_message(prompt_end):
            return None  # the grammar allows no headers of messages (`form_grammar`)
        if self._is_harmony or (reads_calls and self.tools == HARMONY_TOOLS):
            parser = HarmonyParser(is_in_content=not begins_message(prompt_end))
            return AnswerParser(parser, None, options)
        calls = (
            new_tool_parser(self.tools, options.tools, options.is_strict) if reads_calls else None
        )
        if self.tags is not None:
            is_open = self.tags.are_open(prompt_end, options.continues_message)
            return AnswerParser(ThinkParser(self.tags, is_open), calls, options)
        return None if calls is None else AnswerParser(calls, None, options)
