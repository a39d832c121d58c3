"""Parse sampled text into reasoning, content and tool calls, while it is being streamed.

A message consists of blocks between delimiters, for example `<think>` and `</think>`. Each family
of models has its own message format. `FORMATS` lists them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from skyrl_tx.apps.chat import tool_calls
from skyrl_tx.apps.chat.text import count_possible_start
from skyrl_tx.apps.chat.tool_calls import Reader, ToolCall


@dataclass(frozen=True, slots=True)
class TextPart:
    """New text of a message, as opposed to a tool call."""

    kind: Literal["reasoning", "content"]
    text: str


Part = TextPart | ToolCall


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """A part of a message between two delimiters.

    A "call" is held back until it is complete. A "dropped" block is a delimiter without a meaning.
    """

    kind: Literal["reasoning", "content", "call", "dropped"]
    start: str
    ends: tuple[str, ...] = ()
    """The first of these delimiters ends the block. A block without them ends with the message.
    An empty delimiter ends it at once."""
    read: Reader | None = None
    """Reads the tool calls of a block of kind "call"."""
    header: re.Pattern[str] | None = None
    """Must match the text before `start`, if the format has headers."""
    before_content: bool = False
    """The block is recognized only before any content. Reasoning and tool calls may come before it."""
    keeps_end: bool = False
    """The delimiter that ends the block also begins the next block."""
    needs_end: bool = False
    """A block of kind "call" without its end is malformed."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How a family of models writes a message."""

    blocks: tuple[MessageBlock, ...] = ()
    template_markers: tuple[str, ...] = ()
    """Texts that identify the format in a chat template."""
    inner_delimiters: tuple[str, ...] = ()
    """Special tokens inside a block that the reader of a tool call needs."""
    has_headers: bool = False
    """The text before a block is not content, but says what the block is."""

    def list_delimiters(self, *, has_tools: bool) -> set[str]:
        """Return the texts that the detokenizer must keep even if they are special tokens."""
        form = self._select(calls=has_tools, reasoning=True)
        return {text for block in form.blocks for text in (block.start, *block.ends)} | set(form.inner_delimiters)

    @property
    def has_calls(self) -> bool:
        """Whether the format has tool calls."""
        return any(block.kind == "call" for block in self.blocks)

    def create_parser(
        self, prompt: str, tools: Sequence[Mapping[str, object]], *, separates_reasoning: bool
    ) -> "MessageParser":
        """Create a parser for one reply to `prompt`. Without tools, tool calls are content."""
        form = self._select(calls=bool(tools), reasoning=separates_reasoning)
        return MessageParser(form, tool_calls.collect_schemas(tools), prefilled=find_prefilled(form, prompt))

    def _select(self, *, calls: bool, reasoning: bool) -> "MessageFormat":
        left_out = {*(() if calls else ("call", "dropped")), *(() if reasoning else ("reasoning",))}
        blocks = tuple(block for block in self.blocks if block.kind not in left_out)
        inner_delimiters = self.inner_delimiters if calls or self.has_headers else ()
        return replace(self, blocks=blocks, inner_delimiters=inner_delimiters)


_THOUGHTS = (
    MessageBlock("reasoning", "<think>", ("</think>",), before_content=True),
    MessageBlock("reasoning", "[THINK]", ("[/THINK]",), before_content=True),
)
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MESSAGE = "<|message|>"
_PIECE = 4096
"""A long text is read in pieces of this many characters."""
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_AT_ONCE = ("",)

FORMATS: Mapping[str, MessageFormat] = {
    # gpt-oss
    "harmony": MessageFormat(
        (
            MessageBlock("call", _MESSAGE, _HARMONY_ENDS, tool_calls.read_harmony, re.compile(r"to=functions\.")),
            MessageBlock("reasoning", _MESSAGE, _HARMONY_ENDS, header=re.compile("analysis")),
            MessageBlock("content", _MESSAGE, _HARMONY_ENDS),
        ),
        template_markers=("<|channel|>",),
        inner_delimiters=("<|start|>", "<|channel|>", "<|constrain|>"),
        has_headers=True,
    ),
    # DeepSeek V3.2, and V4, which wraps its calls in `tool_calls` instead of `function_calls`
    "deepseek_v32": MessageFormat(
        (
            *_THOUGHTS,
            MessageBlock("call", "<｜DSML｜invoke", ("</｜DSML｜invoke>",), tool_calls.read_dsml, needs_end=True),
            MessageBlock("dropped", "<｜DSML｜function_calls>", _AT_ONCE),
            MessageBlock("dropped", "</｜DSML｜function_calls>", _AT_ONCE),
            MessageBlock("dropped", "<｜DSML｜tool_calls>", _AT_ONCE),
            MessageBlock("dropped", "</｜DSML｜tool_calls>", _AT_ONCE),
        ),
        template_markers=("｜DSML｜",),
        inner_delimiters=("｜DSML｜",),
    ),
    # DeepSeek V3, V3.1 and R1
    "deepseek": MessageFormat(
        (
            *_THOUGHTS,
            MessageBlock("call", "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), tool_calls.read_deepseek),
            MessageBlock("dropped", "<｜tool▁calls▁begin｜>", _AT_ONCE),
            MessageBlock("dropped", "<｜tool▁calls▁end｜>", _AT_ONCE),
        ),
        template_markers=("<｜tool▁call▁begin｜>",),
        inner_delimiters=("<｜tool▁sep｜>",),
    ),
    # Kimi K2
    "kimi": MessageFormat(
        (
            *_THOUGHTS,
            MessageBlock("call", "<|tool_call_begin|>", ("<|tool_call_end|>",), tool_calls.read_kimi),
            MessageBlock("dropped", "<|tool_calls_section_begin|>", _AT_ONCE),
            MessageBlock("dropped", "<|tool_calls_section_end|>", _AT_ONCE),
        ),
        template_markers=("<|tool_call_begin|>",),
        inner_delimiters=("<|tool_call_argument_begin|>",),
    ),
    # Mistral, Magistral and Devstral
    "mistral": MessageFormat(
        (
            *_THOUGHTS,
            MessageBlock("call", "[TOOL_CALLS]", ("[TOOL_CALLS]",), tool_calls.read_mistral, keeps_end=True),
        ),
        template_markers=("[TOOL_CALLS]",),
        inner_delimiters=("[ARGS]", "[CALL_ID]"),
    ),
    # Qwen3-Coder, Qwen3.5 and Nemotron 3
    "qwen3_coder": MessageFormat(
        (
            *_THOUGHTS,
            MessageBlock("call", _CALL, (_END_CALL,), tool_calls.read_xml),
            # Qwen3-Coder sometimes forgets `<tool_call>`
            MessageBlock("call", "<function=", ("</function>",), tool_calls.read_xml, needs_end=True),
            MessageBlock("dropped", _END_CALL, _AT_ONCE),
        ),
        template_markers=("<function=",),
    ),
    # GLM-4.5 to 4.7
    "glm": MessageFormat(
        (*_THOUGHTS, MessageBlock("call", _CALL, (_END_CALL,), tool_calls.read_glm, needs_end=True)),
        template_markers=("<arg_key>",),
    ),
    # Hermes, Qwen2.5 and Qwen3
    "hermes": MessageFormat(
        (*_THOUGHTS, MessageBlock("call", _CALL, (_END_CALL,), tool_calls.read_hermes)), template_markers=(_CALL,)
    ),
    # Llama 4, and Llama 3.2 if its chat template asks for calls in Python syntax
    "llama4": MessageFormat(
        (
            *_THOUGHTS,
            MessageBlock("call", "<|python_start|>", ("<|python_end|>",), tool_calls.read_pythonic),
            MessageBlock("call", "[", read=tool_calls.read_pythonic, before_content=True),
        ),
        template_markers=("[func_name1(",),
    ),
    # Llama 3
    "llama3": MessageFormat(
        (
            *_THOUGHTS,
            MessageBlock("call", "<|python_tag|>", read=tool_calls.read_llama3, before_content=True),
            MessageBlock("call", "{", read=tool_calls.read_llama3, before_content=True),
        ),
        template_markers=("<|python_tag|>", "ipython"),
    ),
    "none": MessageFormat(_THOUGHTS),
}
"""The formats by name. The first one with a marker in the chat template is chosen."""


def choose_format(template: str) -> str:
    """Choose a format from the text of the model's chat template. Returns its name."""
    return next(
        (name for name, form in FORMATS.items() if any(marker in template for marker in form.template_markers)), "none"
    )


def find_prefilled(form: MessageFormat, prompt: str) -> str:
    """Return the end of a prompt if it opens a block, else "".

    For example, a chat template may end the prompt with `<think>`.
    """
    if form.has_headers:
        _, start, last = prompt.rpartition("<|start|>")
        return last if start and _MESSAGE in last else ""
    end = prompt.rstrip()
    return next((block.start for block in form.blocks if block.kind == "reasoning" and end.endswith(block.start)), "")


class MessageParser:
    """Parses a message that arrives in chunks.

    White space around reasoning and tool calls is dropped. A malformed or incomplete tool call is
    returned as text.
    """

    def __init__(self, form: MessageFormat, schemas: tool_calls.Schemas | None = None, *, prefilled: str = "") -> None:
        """`prefilled` is the beginning of the message that the chat template wrote, such as `<think>`."""
        self._form = form
        self._schemas = schemas or {}
        self._starts = sorted({block.start for block in form.blocks if not block.before_content})

        # Text and block that were not returned yet
        self._held = ""
        """Text that was not parsed yet."""
        self._block: MessageBlock | None = None
        """The block that is open, or None."""
        self._opened_by = ""
        """The header and the delimiter that opened the block.

        They are returned as text if the block is malformed. Empty once text of the block was returned.
        """

        # What was returned so far
        self._space = ""
        """White space at the end of the content so far. It is dropped if a block follows."""
        self._has_content = False
        """There was content before."""
        self._follows_block = False
        """Reasoning or a tool call came last, so white space at the beginning of content is dropped."""
        self._has_text_block = False
        """A block of kind "content" had text."""
        self.has_calls = False
        """True once the message has a tool call."""

        self.feed(prefilled)
        self.has_calls = False

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Add text and return the new parts in order.

        With `is_last`, return everything that was held back.
        """
        # Read pieces: at each delimiter the rest of the text is copied, which takes long for a long text
        parts: list[Part] = []
        for start in range(0, len(text), _PIECE):
            self._held += text[start : start + _PIECE]
            parts += self._read(is_last=False)

        # The rest, and the white space at the end
        if is_last:
            parts += self._read(is_last=True)
            parts += _make_text("content", "" if self._follows_block else self._space)
            self._space = ""
        return parts

    def _read(self, *, is_last: bool) -> list[Part]:
        """Read blocks until more text is needed."""
        parts: list[Part] = []
        is_waiting = False
        while not is_waiting:
            block = self._block
            parts += self._read_outside(is_last=is_last) if block is None else self._read_inside(block, is_last=is_last)
            is_waiting = self._block is block
        return parts

    def _read_outside(self, *, is_last: bool) -> list[Part]:
        """Read up to the beginning of the next block."""
        # A block that can only be the first. Wait while the text may be the beginning of one.
        if not self._has_content:
            firsts = [block for block in self._form.blocks if block.before_content]
            text = self._held.lstrip()
            for block in firsts:
                if text.startswith(block.start):
                    self._open(block, block.start, text[len(block.start) :])
                    return []
            if not is_last and any(block.start.startswith(text) for block in firsts):
                return []

        # Any other block. Without one, return the text except for a possible beginning of a delimiter.
        found = [(self._held.find(start), start) for start in self._starts if start in self._held]
        if not found:
            if self._form.has_headers and not (is_last and not self._has_content):
                return []
            keep = 0 if is_last or not self._starts else count_possible_start(self._held, self._starts)
            return self._release(self._take(len(self._held) - keep))

        # Open the block
        position, start = min(found)
        before = self._take(position)
        is_header = self._form.has_headers
        blocks = [block for block in self._form.blocks if block.start == start]
        block = next(block for block in blocks if block.header is None or block.header.search(before))
        parts = [] if is_header else self._release(before)
        self._open(block, before + start if is_header else start, self._held[len(start) :])
        return parts

    def _open(self, block: MessageBlock, opened_by: str, rest: str) -> None:
        self._block, self._opened_by, self._held = block, opened_by, rest
        if block.kind != "call":
            self._space, self._follows_block = "", True
        if self._form.has_headers:
            self._has_content = True

    def _take(self, size: int) -> str:
        """Remove and return the beginning of the text that was not parsed yet."""
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _read_inside(self, block: MessageBlock, *, is_last: bool) -> list[Part]:
        """Read up to the end of the open block. White space at the beginning of reasoning is dropped."""
        if block.kind == "reasoning" and self._opened_by:
            self._held = self._held.lstrip()
        found = [(self._held.find(end), end) for end in block.ends if end in self._held]

        # The end is not there yet
        if not found and not is_last:
            if block.kind == "call":
                return []
            keep = count_possible_start(self._held, block.ends)
            if block.kind == "reasoning":
                before = self._held[: len(self._held) - keep]
                keep += len(before) - len(before.rstrip())
            return self._read_text(block, self._take(len(self._held) - keep))

        # Close the block
        position, end = min(found) if found else (len(self._held), "")
        body = self._take(position)
        if not block.keeps_end:
            self._take(len(end))
        self._block = None

        if block.read is None:
            return self._read_text(block, body.rstrip() if block.kind == "reasoning" else body)
        is_complete = bool(end) or not block.needs_end
        calls = tool_calls.read_calls(block.read, self._opened_by + body, self._schemas) if is_complete else None
        if calls is None:
            return self._release(self._opened_by + body + ("" if block.keeps_end else end))
        self._space, self._follows_block, self.has_calls = "", True, True
        return [*calls]

    def _read_text(self, block: MessageBlock, text: str) -> list[Part]:
        """Return text of the open block. Inserts an empty line between two blocks of content."""
        if block.kind in ("dropped", "call") or not text:
            return []

        is_new, self._opened_by = bool(self._opened_by), ""
        if block.kind == "reasoning":
            return [TextPart("reasoning", text)]
        if is_new and self._has_text_block:
            text = f"\n\n{text}"
        self._has_text_block, self._follows_block = True, False
        return [TextPart("content", text)]

    def _release(self, text: str) -> list[Part]:
        """Return text that is certainly content.

        White space at its end is held back if a block may follow.
        """
        text = self._space + text
        content = text.rstrip() if self._starts else text
        self._space = text[len(content) :]
        if self._follows_block:
            content = content.lstrip()
        if content:
            self._has_content, self._follows_block = True, False
        return _make_text("content", content)


def _make_text(kind: Literal["reasoning", "content"], text: str) -> list[Part]:
    return [TextPart(kind, text)] if text else []
