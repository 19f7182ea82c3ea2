"""What the columns of a data set are called, where they are not called what we call them."""

from pydantic import Field

from configs import Config


class Columns(Config):
    """For each field of a shape the column of the file that holds it. Unset: its own name."""

    messages: str | None = None
    """Turns of a conversation."""

    conversations: str | None = None
    """Turns of a ShareGPT conversation."""

    instruction: str | None = None
    """Alpaca's question."""

    input: str | None = None
    """Alpaca's second part of the question."""

    output: str | None = None
    """Alpaca's answer."""

    history: str | None = None
    """Alpaca's earlier questions with their answers."""

    system: str | None = None
    """A system turn."""

    prompt: str | None = None
    """What stands before a completion or before two answers."""

    completion: str | None = None
    """The answer to a prompt."""

    question: str | None = None
    """A question."""

    answer: str | None = None
    """Its answer."""

    chosen: str | None = None
    """The better answer, or a conversation that ends in it."""

    rejected: str | None = None
    """The worse answer, or a conversation that ends in it."""

    label: str | None = None
    """Whether a completion is good."""

    text: str | None = None
    """A text to continue, or a transcript."""

    tools: str | None = None
    """Definitions of the functions that an assistant may call."""

    role: str | None = None
    """In a turn: who speaks."""

    content: str | None = None
    """In a turn: what is said."""

    user_roles: tuple[str, ...] = Field(default=())
    """Further names of the user's role."""

    assistant_roles: tuple[str, ...] = Field(default=())
    """Further names of the assistant's role."""

    system_roles: tuple[str, ...] = Field(default=())
    """Further names of the system's role."""


FIELDS = tuple(
    name
    for name in Columns.model_fields
    if name not in ("role", "content") and not name.endswith("_roles")
)


def given(columns: Columns | None) -> dict[str, str]:
    """Field to column, of those that were set."""
    named = columns.model_dump(include=set(FIELDS), exclude_none=True) if columns else {}
    return {field: str(column) for field, column in named.items()}
