"""Parse messages with the response template of a model, as `parse_response` of transformers does.

A few models have the field `response_template` in `tokenizer_config.json`. It describes the form of
their messages, so that no entry in `FORMATS` is necessary.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from skyrl_tx.apps.chat.message import Part, TextPart
from skyrl_tx.apps.chat.tool_calls import make_call
from skyrl_tx.contract.errors import UserError

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CALLS = "tool_calls"


class ResponseTemplate:
    """The response template of a model."""

    def __init__(self, description: object, special_tokens: Collection[str]) -> None:
        """Check the template. Raises ImportError if the installed transformers is too old.

        Raises UserError if the template is malformed.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._special_tokens = special_tokens
        try:
            self._template: Any = load_response_template(cast(Any, description))
        except (ValueError, TypeError) as error:
            raise UserError(f"the model's response template is malformed: {error}") from error
        self.has_calls = _CALLS in self._template.fields

    def list_delimiters(self, *, has_tools: bool) -> Collection[str]:
        """Return all special tokens, because the template may use any of them."""
        return self._special_tokens

    def create_parser(
        self, prompt: str, tools: Sequence[Mapping[str, object]], *, separates_reasoning: bool
    ) -> "TemplateParser":
        """Create a parser for one reply to `prompt`."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(self._template, prefix=prompt, tools=cast(Any, list(tools)))
        return TemplateParser(parser, has_tools=bool(tools), separates_reasoning=separates_reasoning)


class TemplateParser:
    """Parses a message that arrives in parts, as `MessageParser` does.

    After a malformed tool call, the rest of the message is returned as text.
    """

    def __init__(self, parser: "ResponseParser", *, has_tools: bool, separates_reasoning: bool) -> None:
        self._parser: ResponseParser | None = parser
        self._has_tools = has_tools
        self._separates_reasoning = separates_reasoning
        self._call = ""
        """The text of the tool call that is open."""
        self._space = ""
        """White space at the end of the open region. It is dropped if nothing follows in the region."""
        self._has_text = False
        self.has_calls = False
        """True once the message has a tool call."""

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Add text and return the new parts in order."""
        if self._parser is None:
            return [TextPart("content", text)] if text else []

        # The template decides what is malformed, and its errors are of different types
        events: list[dict[str, Any]] = []
        rest = text
        try:
            events += self._parser.feed(text)
            rest = ""
            if is_last:
                events += self._parser.finalize()[1]
        except (ValueError, KeyError, RecursionError):
            self._parser = None

        parts = [part for event in events for part in self._read(event)]
        if self._parser is None and self._call + rest:
            parts.append(TextPart("content", self._call + rest))
        return parts

    def _read(self, event: Mapping[str, Any]) -> Iterator[Part]:
        """Yield the parts that an event of the parser adds to the message."""
        name = event["field"]
        match event["type"]:
            case "region_open":
                self._call, self._space, self._has_text = "", "", False
            case "region_chunk" if name == _CALLS:
                self._call += event["text"]
            case "region_chunk":
                if text := self._strip(event["text"]):
                    is_reasoning = name in _REASONING and self._separates_reasoning
                    yield TextPart("reasoning" if is_reasoning else "content", text)
            case "region_close" if name == _CALLS:
                yield from self._read_calls(event["value"])
                self._call = ""
            case _:
                pass

    def _strip(self, text: str) -> str:
        """Return new text of a region without white space at the beginning and end of the region."""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        shown = stripped if self._has_text else stripped.lstrip()
        self._has_text = self._has_text or bool(shown)
        return shown

    def _read_calls(self, value: Any) -> Iterator[Part]:
        """Yield the tool calls of a region, or its text if they are malformed or there are no tools."""
        try:
            functions = [call["function"] for call in (value if isinstance(value, list) else [value])]
            calls = [make_call(function["name"], function["arguments"]) for function in functions]
        except (ValueError, KeyError, TypeError):
            calls = []
        if not calls or not self._has_tools:
            yield TextPart("content", self._call)
            return
        self.has_calls = True
        yield from calls
