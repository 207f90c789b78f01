"""The parsing of a request's answers: its parser, and the special tokens that the parser reads."""

import hashlib
from collections.abc import Sequence

from penstock.common.structured_outputs import StructuredOutputs, after_reasoning
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.common.thinking_budget import NAME, ThinkingBudget
from penstock.router.config import RouterConfig
from penstock.router.errors import invalid
from penstock.router.parsers.answer_parser import (
    PROMPT_END_TOKENS,
    AnswerParsers,
    ParsingOptions,
)
from penstock.router.parsers.pieces import OutputParser
from penstock.router.parsers.tools.call_grammar import CallGrammar, CallsGrammar
from penstock.router.requests.strict_calls import strict_form

CALL_ID_DIGITS = 24
MISTRAL_ID_DIGITS = 9
"""Length that Mistral's chat templates require of call ids."""


class AnswerParsing:
    """Makes the parsers for the answers to one chat.

    Args:
        parsers: the model's parsers.
        tokenizer: decodes the end of the prompt.
        prompt: token ids of the prompt.
        request_id: id of the request, which determines the ids of tool calls.
        options: options of the request.
    """

    def __init__(
        self,
        parsers: AnswerParsers,
        tokenizer: ModelTokenizer,
        prompt: Sequence[int],
        request_id: str,
        options: ParsingOptions,
    ) -> None:
        self._parsers = parsers
        self._options = options
        self._prompt_end = _prompt_end(tokenizer, prompt)
        self._seed = f"{request_id}\0{len(prompt)}"
        self._is_mistral = parsers.tools == "mistral"

    def new_parser(self) -> OutputParser | None:
        """Return the parser of one answer, or None if all of the answer is content."""
        return self._parsers.new(self._prompt_end, self._options)

    def call_id(self, choice: int, call: int) -> str:
        """Return the id of a tool call, which is the same if the request is repeated.

        The id is a hash of the request id, the prompt's length, the choice and the call. It
        includes the length because all requests of a conversation may have the same request id.
        """
        text = f"{self._seed}\0{choice}\0{call}"
        digits = hashlib.blake2b(text.encode(), digest_size=CALL_ID_DIGITS // 2).hexdigest()
        return digits[:MISTRAL_ID_DIGITS] if self._is_mistral else f"call_{digits}"


class ModelParsers:
    """The parsers for the answers of the served model.

    Raises:
        ValueError: the configuration names an unknown parser.
    """

    def __init__(self, tokenizer: ModelTokenizer, config: RouterConfig) -> None:
        self._tokenizer = tokenizer
        source = tokenizer.chat_template
        template = "" if source is None else source.template
        self._parsers = AnswerParsers(template, config.tool_call_parser, config.reasoning_parser)
        # Cached results of `shown_tokens`, by `ParsingOptions.reads_calls`.
        self._shown: dict[bool, frozenset[int]] = {}

    @property
    def reads_reasoning(self) -> bool:
        """True if the model's reasoning is separated from its answers."""
        return self._parsers.reads_reasoning

    @property
    def can_limit_reasoning(self) -> bool:
        """True if one token ends the model's reasoning, so that the end can be forced."""
        return self._reasoning_end() is not None

    def thinking_budget(
        self, num_tokens: int, prompt: Sequence[int], continues_message: bool = False
    ) -> ThinkingBudget:
        """Return the thinking budget of `num_tokens` tokens for the answers to a prompt.

        Args:
            num_tokens: the largest number of reasoning tokens.
            prompt: token ids of the prompt.
            continues_message: see `ParsingOptions`.

        Raises:
            ServingError: INVALID if the reasoning of this model cannot be limited.
        """
        tags, end = self._parsers.tags, self._reasoning_end()
        if tags is None or end is None:
            reason = "this model does not reason"
            if self.reads_reasoning:
                reason = "no single token ends the reasoning of this model"
            raise invalid(f"{NAME} is not supported, because {reason}: leave out {NAME}", NAME)
        if tags.are_open(_prompt_end(self._tokenizer, prompt), continues_message):
            return ThinkingBudget(num_tokens, end)
        start = self._tokenizer.encode(tags.start, add_special_tokens=False)
        return ThinkingBudget(num_tokens, end, tuple(start))

    def _reasoning_end(self) -> int | None:
        """Return the token that ends reasoning, or None if there is no such token."""
        tags = self._parsers.tags
        if tags is None:
            return None
        end: int | None = self._tokenizer.tokenizer.token_to_id(tags.end)
        return end

    def check_tools(self) -> None:
        """Refuse a request with tools if the format of the model's calls is unknown."""
        if not self._parsers.reads_tools:
            raise invalid(
                "the format of this model's tool calls is unknown: leave out 'tools', or start the "
                "server with --tool-call-parser",
                "tools",
            )

    def strict_form(
        self,
        prompt: Sequence[int],
        calls: bytes,
        is_parallel: bool = True,
        continues_message: bool = False,
    ) -> StructuredOutputs:
        """Return the constraint on answers to a prompt with strict functions.

        Args:
            prompt: token ids of the prompt.
            calls: the functions, from `strict_calls`.
            is_parallel: whether an answer may have several calls; if not, it ends after one call.
            continues_message: see `ParsingOptions`.

        Raises:
            ServingError: INVALID if the model's format of calls has no grammar.
        """
        end = _prompt_end(self._tokenizer, prompt)

        def grammar_of(names: Sequence[str]) -> CallsGrammar | None:
            special = sorted(self._tokenizer.token_bytes.special)
            grammar = CallGrammar(names, self._special_id, special, is_parallel)
            return self._parsers.grammar(end, grammar, continues_message)

        form = strict_form(calls, grammar_of)
        if form is None:
            raise invalid(
                f"'strict' is not supported with the tool call format {self._parsers.tools} of "
                "this model: set 'strict' to false, or force a tool call with tool_choice",
                "tools",
            )
        return form

    def answer_form(
        self, prompt: Sequence[int], form: StructuredOutputs, continues_message: bool = False
    ) -> StructuredOutputs:
        """Return the constraint on answers to a prompt whose content must satisfy `form`.

        If the answers may contain reasoning, `form` applies after the reasoning.

        Args:
            prompt: token ids of the prompt.
            form: the constraint on the content.
            continues_message: see `ParsingOptions`.
        """
        end = _prompt_end(self._tokenizer, prompt)
        grammar = self._parsers.form_grammar(end, self._special_id, continues_message)
        return after_reasoning(grammar, form) if grammar else form

    def _special_id(self, text: str) -> int | None:
        """Return the id of the special token with a given text, or None if there is none."""
        token: int | None = self._tokenizer.tokenizer.token_to_id(text)
        return token if token in self._tokenizer.token_bytes.special else None

    def shown_tokens(self, options: ParsingOptions) -> frozenset[int]:
        """Return the special tokens that the text of an answer must contain for its parser."""
        found = self._shown.get(options.reads_calls)
        if found is None:
            ids = map(self._tokenizer.tokenizer.token_to_id, self._parsers.markers(options))
            found = frozenset(token for token in ids if token is not None)
            self._shown[options.reads_calls] = found
        return found

    def parsing(
        self, prompt: Sequence[int], request_id: str, options: ParsingOptions
    ) -> AnswerParsing | None:
        """Return the parsing of the answers to a prompt, or None if all answers are content."""
        if not self._parsers.may_find(options):
            return None
        return AnswerParsing(self._parsers, self._tokenizer, prompt, request_id, options)


def _prompt_end(tokenizer: ModelTokenizer, prompt: Sequence[int]) -> str:
    """Return the text of a prompt's last tokens, with special tokens."""
    return tokenizer.token_bytes.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
