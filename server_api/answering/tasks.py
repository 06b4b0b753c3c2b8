"""Which chat requests are chores of a front end, not part of the conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TASK_OPENINGS = (
    "### Task:\nGenerate ",
    "### Task:\nSuggest ",
    "### Task:\nAnalyze the chat history",
    "### Task:\nYou are an autocompletion system",
    "Your task is to reflect the speaker's likely facial expression",
    "Provide a concise, 5-word-or-less title for the conversation",
)
"""How the last message of a chore begins: Open WebUI's titles, tags, follow-up questions, search queries, completions
and emoji, LibreChat's titles. Open WebUI's "### Task:\\nRespond to the user query" is none: it wraps what a user asks.
"""


def is_background_task(messages: Sequence[Mapping[str, str]]) -> bool:
    """Whether a front end asks on its own account, so that nothing is to be learnt from it."""
    last = messages[-1]
    return last["role"] == "user" and last["content"].lstrip().startswith(TASK_OPENINGS)
