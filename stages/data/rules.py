"""The named rules that a row of training data can break."""

from typing import Any

RULES = {
    # A row as it stands in its file.
    "invalid_json": "the line is not JSON",
    "invalid_utf8": "the line is not UTF-8 text",
    "not_an_object": "a row is a JSON object with named columns",
    "missing_column": "a column that the shape needs is absent or null",
    "not_turns": "a turn is an object with role and content (or from and value)",
    "not_text": "the text of a turn is a string that UTF-8 can write",
    "unknown_role": "roles are system, user (human) and assistant (gpt)",
    "tool_call": "tool calls and tool definitions are not supported",
    # What a conversation or a pair must be.
    "empty_conversation": "a conversation has turns",
    "empty_turn": "every turn has a text",
    "misplaced_system": "a system turn stands first, once",
    "no_assistant_turn": "there is an assistant turn to learn from",
    "opens_with_assistant": "the first turn, but for the system's, is the user's",
    "ends_with_user": "the last turn is the assistant's",
    "answer_without_question": "the turn before a pair's answers is the user's",
    "different_prompts": "the two conversations of a pair differ in the last turn only",
    "chosen_equals_rejected": "the two answers of a pair differ",
    # What the user asked to leave out; never counted against the drop budget.
    "too_long": "the row is longer than the limit that was set",
    # What a model's template and tokenizer make of a row.
    "cannot_be_rendered": "the chat template refuses the conversation",
    "history_rewritten": "the template renders earlier turns differently once later turns follow",
    "answer_rewritten": "the template renders an assistant turn without its text",
    "special_token_in_text": "a turn holds the text of a special token, which would become one",
    "two_bos": "the rendering begins with two BOS tokens",
    "no_stop_token": "the template closes an assistant turn without a stop token",
    "no_trained_token": "the row has no token to learn from",
}


class RowError(ValueError):
    """A row breaks ``rule``, a key of :data:`RULES`; ``detail`` says how."""

    def __init__(self, rule: str, detail: str = "") -> None:
        assert rule in RULES, rule
        self.rule = rule
        self.detail = detail or RULES[rule]
        super().__init__(f"{rule}: {self.detail}")


def text(value: Any, *, column: str) -> str:
    """``value`` if it is a string that can be written as UTF-8. Raises :class:`RowError`."""
    if not isinstance(value, str):
        raise RowError("not_text", f"{column} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError("not_text", f"{column} holds half a surrogate pair ({error})") from None
    return value
