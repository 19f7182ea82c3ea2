"""The named rules that a row of training data can break."""

from typing import Any

RULES = {
    # A row as it stands in its file.
    "invalid_json": "the line is not JSON",
    "invalid_utf8": "the line is not UTF-8 text",
    "wrong_number_of_cells": "a line of a table has as many cells as the header",
    "repeated_key": "an object in a row names each of its keys once",
    "not_an_object": "a row is a JSON object with named columns",
    "missing_column": "a column that the shape needs is absent or null",
    "not_turns": "a turn is an object with role and content (or from and value)",
    "not_text": "the text of a turn is a string that UTF-8 can write",
    "not_a_label": "a label is true or false, or 1 or 0",
    "bad_train_flag": "train and weight are true or false, or 1 or 0",
    "unknown_role": "a role is one that is known, or one that the columns setting names",
    "bad_tool_call": "a tool call has a name and arguments that are a JSON object",
    "bad_tools": "tools is a list of function definitions with names, or such a list as JSON text",
    # What a conversation, a pair or a text must be.
    "empty_conversation": "a conversation has turns",
    "empty_turn": "every turn has a text, or calls a tool",
    "empty_text": "a text is not blank",
    "misplaced_system": "a system turn stands first, once",
    "misplaced_tool_result": "a tool's result follows a call",
    "no_assistant_turn": "there is an assistant turn to learn from",
    "opens_with_assistant": "the first turn, but for the system's, is the user's",
    "ends_with_user": "the last turn is the assistant's",
    "answer_without_question": "the turn before a pair's answers is the user's or a tool's",
    "different_prompts": "the two conversations of a pair begin with the prompt and differ in the "
    "last turn only",
    "answer_not_trained": "the answers of a pair are not marked as untrained",
    "chosen_equals_rejected": "the two answers of a pair differ",
    # What the user asked to leave out; never counted against the drop budget.
    "too_long": "the row is longer than the limit that was set",
    # What a model's template and tokenizer make of a row.
    "cannot_be_rendered": "the chat template refuses the conversation",
    "tools_not_rendered": "the template shows the row's tools and tool calls, parameters, "
    "descriptions and arguments included",
    "history_rewritten": "the template renders earlier turns as they are, whatever follows",
    "turn_not_rendered": "the text of every turn is in the rendering, in the turns' order",
    "answer_rewritten": "the template renders an assistant turn with its text",
    "thoughts_not_rendered": "the template shows the thoughts of the last answer",
    "answer_cut": "the whole answer stands before its first stop token",
    "special_token_in_text": "no text holds a special token, which it would become",
    "two_bos": "the rendering begins with one BOS token at most",
    "no_stop_token": "the template closes an assistant turn with a stop token",
    "no_trained_token": "the row has a token to learn from",
}
"""Each rule says what holds for a good row."""


class RowError(ValueError):
    """A row breaks ``rule``, a key of :data:`RULES`; ``detail`` says how."""

    def __init__(self, rule: str, detail: str = "") -> None:
        assert rule in RULES, rule
        self.rule = rule
        self.detail = detail or RULES[rule]
        super().__init__(f"{rule}: {self.detail}")

    def __reduce__(self) -> tuple[type["RowError"], tuple[str, str]]:
        return RowError, (self.rule, self.detail)  # to pass from one process to another


def writable(said: str) -> str:
    """``said`` as UTF-8 can hold it: halves of surrogate pairs are written out."""
    return said.encode(errors="backslashreplace").decode()


def text(value: Any, *, column: str) -> str:
    """``value`` if it is a string that can be written as UTF-8. Raises :class:`RowError`."""
    if not isinstance(value, str):
        raise RowError("not_text", f"{column} is {type(value).__name__}, not text")
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError("not_text", f"{column} holds half a surrogate pair ({error})") from None
    return value
