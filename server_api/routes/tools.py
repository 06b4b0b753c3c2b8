"""llama.cpp's helper routes: tokens of a text, text of tokens, the prompt of a chat, the server's properties."""

from __future__ import annotations

import asyncio
import dataclasses

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import fednl_runtime
from fednl_runtime.errors import RequestError
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.server_api.errors import naming
from fednl_runtime.server_api.schemas.tools import DetokenizeRequest, TemplateRequest, TokenizeRequest
from fednl_runtime.server_api.served import served_by
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer, require_unicode

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text, with their pieces if asked for."""
    tokenizer = served_by(request).engine.tokenizer
    with naming({"prompt": "content"}):
        tokens = await asyncio.to_thread(tokenizer.encode, body.content)
    pieces = [{"id": token, "piece": piece(tokenizer, token)} for token in tokens] if body.with_pieces else tokens
    return JSONResponse({"tokens": pieces})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
    engine = served_by(request).engine
    vocab = engine.backend.config.vocab_size
    if not all(0 <= token < vocab for token in body.tokens):
        raise RequestError(f"tokens holds an id outside 0 to {vocab - 1}.", "tokens")
    return JSONResponse({"content": await asyncio.to_thread(engine.tokenizer.decode, body.tokens)})


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, request: Request) -> Response:
    """The text that a chat request with these messages makes of them."""
    prompt = await asyncio.to_thread(served_by(request).template.render, body.conversation())
    require_unicode(prompt, "messages")
    return JSONResponse({"prompt": prompt})


@router.get("/props")
async def props(request: Request) -> Response:
    """What the server is: its model, its defaults and its limits."""
    served = served_by(request)
    limits = served.engine.limits
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": limits.max_prompt_tokens,
                "params": {**dataclasses.asdict(SamplingParams()), "max_tokens_limit": limits.max_tokens},
            },
            "total_slots": limits.slots,
            "model_alias": served.model,
            "model": served.model_object(),
            "chat_template": served.template.source,
            "chat_template_note": served.template.note,
            "chat_template_stop": served.template.stop,
            "bos_token": "",
            "eos_token": END_OF_TEXT,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"fednl-runtime {fednl_runtime.__version__}",
        }
    )


def piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The text of a token, or its bytes if they are no text."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
