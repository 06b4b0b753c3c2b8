"""What the routes of completions and models answer, for the OpenAPI document; tests hold the server to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"
"""Where a document keeps the schema of a model."""


class Answer(BaseModel):
    """An answer with exactly these fields."""

    model_config = ConfigDict(extra="forbid")


def definitions(models: Iterable[type[Answer]]) -> dict[str, Any]:
    """The schemas of answers and of all they consist of, by name."""
    _, defined = models_json_schema([(m, "serialization") for m in dict.fromkeys(models)], ref_template=REFERENCE)
    return defined["$defs"]


class ErrorDetail(Answer):
    """What went wrong: a sentence, OpenAI's kind of it, the field at fault, our name for it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every error has this body."""

    error: ErrorDetail


class CachedTokens(Answer):
    """Tokens of the prompt that the session had read before."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class SessionReport(Answer):
    """What a turn did to its session."""

    id: str | None
    version: int
    parent_version: int
    tokens_seen: int
    learned: bool
    update_norm: float
    surprise: float | None
    state_bytes: int
    persisted: bool
    replayed: bool


class Timings(Answer):
    """llama.cpp's timings."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Progress(Answer):
    """How much of a prompt was read."""

    total: int
    processed: int
    time_ms: int


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One completion, or a piece of it."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Head(Answer):
    """What all answers to a prompt have in common."""

    id: str
    created: int
    model: str


class Completion(Head):
    """A whole answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    session: SessionReport
    timings: Timings


class ChunkTail(Head):
    """What a chunk may have besides its choices."""

    usage: Usage | None = None
    session: SessionReport | None = None
    timings: Timings | None = None
    prompt_progress: Progress | None = None


class CompletionChunk(ChunkTail):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class RivalToken(Answer):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(RivalToken):
    """A token of an answer and its likeliest rivals."""

    top_logprobs: list[RivalToken]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatToken]
    refusal: None


class ChatMessage(Answer):
    """An answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Head):
    """A whole answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    session: SessionReport
    timings: Timings


class ChatDelta(Answer):
    """What a chunk adds: first who speaks, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatPiece(Answer):
    """A piece of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatChunk(ChunkTail):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]


class ModelObject(Answer):
    """The model; `meta` has llama.cpp's facts and ours."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: dict[str, int | str]


class ModelList(Answer):
    """The one model."""

    object: Literal["list"]
    data: list[ModelObject]


class Cancelled(Answer):
    """A request that was stopped."""

    id: str
    object: Literal["request.cancelled"]
    cancelled: Literal[True]


class TokenPiece(Answer):
    """A token and its text, or its bytes if they are none."""

    id: int
    piece: str | list[int]


class Tokens(Answer):
    """Tokens of a text."""

    tokens: list[int] | list[TokenPiece]


class Content(Answer):
    """Text of tokens."""

    content: str


class Prompt(Answer):
    """Text of messages."""

    prompt: str


class GenerationSettings(Answer):
    """The largest prompt in tokens, and the sampling parameters that hold unless a request says otherwise."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(Answer):
    """What besides text can be read: nothing."""

    vision: Literal[False]
    audio: Literal[False]


class Props(Answer):
    """What the server is."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model: ModelObject
    chat_template: str
    chat_template_note: str
    chat_template_stop: list[str]
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str


class Health(Answer):
    """The server answers."""

    status: Literal["ok"]
