"""Laws of chat templates: the plain one, the model file's, and what a bad one cannot do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engines import CONFIG, running_engine, tiny_tokenizer_json
from models import random_params

from fednl_runtime.errors import ModelFileError, RequestError
from fednl_runtime.export.graph import export_model
from fednl_runtime.onnx_backend import load
from fednl_runtime.server_api.answering.chat_template import MAX_TEMPLATE, PLAIN_NOTE, ChatTemplate
from fednl_runtime.server_api.served import Served

TALK = [
    {"role": "system", "content": "A street in Verona."},
    {"role": "user", "content": "Who's there?\n"},
    {"role": "assistant", "content": "A friend."},
]


def test_the_plain_template_writes_a_play() -> None:
    assert ChatTemplate().render(TALK) == (
        "A street in Verona.\n\nUSER.\nWho's there?\n\n\nASSISTANT.\nA friend.\n\nASSISTANT.\n"
    )
    assert ChatTemplate.of({}).note == PLAIN_NOTE


def test_the_model_files_template_is_used_and_has_no_stop_string_of_ours() -> None:
    source = "{% for m in messages %}\n<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}\n"
    template = ChatTemplate.of({"chat_template": source + "{% if add_generation_prompt %}<assistant>{% endif %}"})
    assert template.render(TALK[1:]) == (
        "<user>Who's there?<|endoftext|>\n<assistant>A friend.<|endoftext|>\n<assistant>"
    )
    assert template.stop == ()


def test_what_a_message_says_is_never_read_as_template() -> None:
    content = "{{ 7 * 7 }}{% for x in y %}"
    assert content in ChatTemplate().render([{"role": "user", "content": content}])


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ }}", "a" * (MAX_TEMPLATE + 1)])
def test_a_template_that_cannot_be_read_is_refused_with_the_model(source: str) -> None:
    with pytest.raises(ModelFileError):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 2 ** 30 }}",
        "{{ '%1000000000d' % 1 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
        "{{ nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% include 'file' %}",
        "{{ lipsum(n=10000) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_that_fails_or_wants_too_much_is_a_refused_request(source: str) -> None:
    with pytest.raises(RequestError) as refused:
        ChatTemplate(source).render(TALK)
    assert refused.value.param == "messages"


def test_a_template_that_takes_too_long_is_stopped() -> None:
    ticks = iter(range(100))
    with pytest.raises(RequestError, match="too much"):
        ChatTemplate("{% for i in range(90) %}{{ i }}{% endfor %}").render(TALK, clock=lambda: next(ticks))


def test_a_served_model_file_brings_its_template_and_its_size(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, memory_period=8, top_period=8, cms_periods=(16, 48))
    path, metadata = tmp_path / "tiny.onnx", {"chat_template": "{{ messages[0].content }}!"}
    export_model(random_params(config), config, tiny_tokenizer_json(), path, name="tiny", metadata=metadata)
    model = load(path, 1).model
    with running_engine() as engine:
        served = Served.of(engine, model, path)
    assert served.template.render([{"role": "user", "content": "hello"}]) == "hello!"
    meta = served.model_object()["meta"]
    assert (meta["size"], meta["n_params"]) == (path.stat().st_size, model.parameters)
