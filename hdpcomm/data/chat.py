"""Conversations as text, with the spans that the assistant wrote: only these count for the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdpcomm.errors import InvalidUsage

__all__ = ["Message", "Span", "assistant_spans", "checked_messages", "plain_chat"]

Message = Mapping[str, str]
Span = tuple[int, int]


def checked_messages(messages: Sequence[Any], where: object) -> list[Message]:
    """Messages with a role and a text each. Raises: InvalidUsage that begins with ``where``."""
    if not messages:
        raise InvalidUsage(f"{where}: this conversation has no message")
    checked: list[Message] = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidUsage(
                f"{where}: message {place} is {_short(message)}; an object with a 'role' and a 'content' was expected"
            )
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not isinstance(content, str):
            raise InvalidUsage(
                f"{where}: the content of message {place} is {_short(content)}; text was expected (images and tool "
                "calls are not supported)"
            )
        checked.append({"role": message["role"], "content": content})
    return checked


def plain_chat(messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """The template for tokenizers without one: ``<|role|>``, the text, ``<|end|>``, each on a line of its own.

    Returns (text, spans of characters that the assistant wrote, with the end that it has to write, too).

    Example:
        >>> plain_chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}])
        ('<|user|>\\nhi\\n<|end|>\\n<|assistant|>\\nyes\\n<|end|>\\n', [(34, 46)])
    """
    text, spans = "", []
    for message in messages:
        text += f"<|{message['role']}|>\n"
        begin = len(text)
        text += f"{message['content']}\n<|end|>\n"
        if message["role"] == "assistant":
            spans.append((begin, len(text)))
    return text, spans


def assistant_spans(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], where: object
) -> tuple[str, list[Span]]:
    """(text, spans of characters that the assistant wrote) of a conversation under a chat template.

    A turn begins where the text of all messages before it ends, with the header that asks for an answer, and ends where
    the text of all messages up to it ends. Templates that show an earlier turn in another way once others follow (as
    those that leave out its reasoning) break this; then the turn is found by its content and by what follows it.

    Args:
        render: ``render(messages, add_generation_prompt)``.

    Raises: InvalidUsage that begins with ``where``: a turn cannot be found in the text.
    """
    whole = render(messages, False)
    spans: list[Span] = []
    cursor = 0
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:place], True) if place else ""
        upto = render(messages[: place + 1], False)
        if whole.startswith(upto) and upto.startswith(before) and len(before) >= cursor:
            span = (len(before), len(upto))
        else:
            span = _by_content(whole, upto, message["content"].strip(), cursor, place, where)
        spans.append(span)
        cursor = span[1]
    return whole, spans


def _by_content(whole: str, upto: str, content: str, cursor: int, place: int, where: object) -> Span:
    ending = upto[upto.rindex(content) + len(content) :] if content and content in upto else None
    begin = whole.find(content, cursor) if ending is not None else -1
    if ending is None or begin < 0 or not whole.startswith(ending, begin + len(content)):
        raise InvalidUsage(
            f"{where}: message {place} of the assistant cannot be found in what the chat template makes of the "
            "conversation; give a template that marks it by {% generation %}"
        )
    return begin, begin + len(content) + len(ending)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
