"""A model with a small tokenizer, whose answers or calls of strict functions follow a grammar."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from penstock.common.grammar.matcher import GrammarVocabulary, Matcher
from penstock.common.structured_outputs import StructuredOutputs
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.router.config import RouterConfig
from penstock.router.parsers.parser_names import REASONING_TAGS, markers_of
from penstock.router.requests.answer_parsing import ModelParsers
from penstock.router.requests.strict_calls import strict_calls
from tests.support.tokenizers import byte_level, write_folder

END = 2
NUMBER: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/unit"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["m", "kg"]}},
}
FUNCTIONS: Sequence[Mapping[str, Any]] = [
    {"name": "add", "parameters": NUMBER, "strict": True},
    {"name": "see", "parameters": {"type": "object"}},
    {"name": "now.utc", "strict": True},
]


class Model:
    """A tokenizer, its vocabulary for grammars, and the parsers of one format.

    Args:
        folder: an empty folder for the files of the tokenizer.
        name: name of the format.
        is_special: whether the format's markers are special tokens.
        reasoning: name of the parser of reasoning.
        is_added: whether the format's markers are added tokens that are not special.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        is_special: bool,
        reasoning: str = "none",
        is_added: bool = False,
    ) -> None:
        tokenizer = byte_level()
        tags = REASONING_TAGS.get(reasoning)
        markers = [*markers_of(name), *(tags.markers if tags else ())]
        if is_special:
            tokenizer.add_special_tokens(
                [AddedToken(each, special=True, normalized=False) for each in markers]
            )
        elif is_added:
            tokenizer.add_tokens([AddedToken(each, normalized=False) for each in markers])
        written = write_folder(folder / "model", tokenizer)
        self.tokenizer = ModelTokenizer(written)
        config = RouterConfig(written, "stub", tool_call_parser=name, reasoning_parser=reasoning)
        self.parsers = ModelParsers(self.tokenizer, config)
        vocab_size = self.tokenizer.vocab_size
        self.vocabulary = GrammarVocabulary(self.tokenizer, vocab_size, [END])

    def matcher(
        self,
        prompt: str = "hello",
        functions: Sequence[Mapping[str, Any]] = FUNCTIONS,
        is_parallel: bool = True,
    ) -> Matcher:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=False)
        form = self.parsers.strict_form(tokens, strict_calls(functions), is_parallel)
        return self.vocabulary.compile(form).matcher()

    def accepted(
        self,
        text: str,
        prompt: str = "hello",
        functions: Sequence[Mapping[str, Any]] = FUNCTIONS,
        is_parallel: bool = True,
    ) -> str:
        """Return the longest beginning of a text that the grammar allows."""
        return self.read(self.matcher(prompt, functions, is_parallel), text)

    def form_matcher(self, prompt: str, form: StructuredOutputs) -> Matcher:
        """Return a matcher for answers whose content, after any reasoning, satisfies `form`."""
        tokens = self.tokenizer.encode(prompt, add_special_tokens=False)
        return self.vocabulary.compile(self.parsers.answer_form(tokens, form)).matcher()

    def read(self, matcher: Matcher, text: str) -> str:
        """Advance the matcher. Return the longest beginning of the text that it allows."""
        tokens = self.tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        for index, token in enumerate(tokens):
            if not matcher.advance([token]):
                return self.decoded(tokens[:index])
        return text

    def decoded(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.token_bytes.decode(list(tokens), skip_special_tokens=False)
