"""Chat templates of checkpoints: rendered as transformers does, and ended where they take too much."""

from __future__ import annotations

import sys

import pytest

from qdsl.cli.app import without_controls
from qdsl.models.chat_template import render
from qdsl.models.plan import LoadError

MESSAGES = [{"role": "system", "content": "Be short. "}, {"role": "user", "content": " Héllo <b>\n"},
            {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "1 + 1?"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# In the ways that families of models write them: loops and loop variables, namespaces, macros, slices, filters, tests, strftime.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<"
        "|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% en"
        "dif %}"),
    "header": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|h|>' + "
        "message['role'] + '<|e|>\n\n' + message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"),
    "instruct": (
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']"
        " %}{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{%- for m in "
        "rest %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('alternate'"
        ") }}{%- endif %}{%- if m.role == 'user' %}{{- '[INST] ' + (system + '\n\n' if loop.last else '') "
        "+ m.content + ' [/INST]' }}{%- else %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"),
    "namespace": (
        "{% set ns = namespace(seen=false, text='') %}{% for m in messages %}{% if m.role == 'user' and "
        "not ns.seen %}{% set ns.seen = true %}{% set ns.text = m.content %}{% continue %}{% endif %}{{ "
        "m.role | upper }}{% endfor %}{{ ns.text }}"),
    "macro": (
        "{% macro turn(m) -%}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{%- endmacro %}{% for m "
        "in messages %}{{ turn(m) }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"),
    "tojson": (
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}{{ messages | tojson(indent=2) }}{{ di"
        "ct(a='<é>') | tojson }}"),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgener"
        "ation %}{% else %}{{ m.content }}{% endif %}{% endfor %}"),
    "reversed": (
        "{% for m in messages[::-1] %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.revindex }}{{"
        " m['content'] }}{% endfor %}"),
    "split": (
        "{{ messages[1].content.split('<')[-1].strip() }}{{ messages | map(attribute='role') | join(',')"
        " }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"),
    "undefined": "{{ missing }}{% if missing is defined %}x{% endif %}{{ (missing or 'default') }}{{ eos_token }}",
    "blocks": (
        "{% for m in messages %}\n    {% if m.content is string %}\n{{ m.content }}\n    {% else %}x{% endi"
        "f %}\n{% endfor %}"),
    "date": (
        "{{ strftime_now('%Y') | length }}{{ range(3) | list }}{{ 'a' in 'abc' }}{{ messages | length - "
        "1 }}"),
}
FAILING = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{%"
        " endfor %}{% endfor %}"),
    "memory": "{{ 'a' * 10**10 }}",
    "width": "{{ '%020000000000d' % 1 }}",
    "format": "{{ '{:>20000000000}'.format('a') }}",
    "lipsum": "{{ lipsum(n=100000, min=100000, max=100001) }}",
    "range": "{{ range(10**9) | list }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
    "syntax": "{% for %}",
    "raised": "{{ raise_exception('\u001b[2J') }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ lipsum.__globals__['os'].system('true') }}",
    "bytes": "{{ cycler.__init__.__globals__ }}",
    "zero": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    [expected], _ = utils.render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS)
    assert render(TEMPLATES[name], MESSAGES, TOKENS, "model") == expected != ""


@pytest.mark.skipif(sys.platform == "win32", reason="processes have no limits of memory")
@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_one_sentence(name: str) -> None:
    with pytest.raises(LoadError) as error:
        render(FAILING[name], MESSAGES, TOKENS, "model")
    message = str(error.value)
    assert message.startswith("model: the chat template fails: ") and message.endswith("; --raw goes without it")
    assert len(message) < 500 and "\n" not in message


def test_no_control_character_of_a_model_reaches_a_terminal() -> None:
    assert without_controls("a\tb\n\x1b]0;x\x07\x9b2J\r\x00é👩‍🚀") == "a\tb\n\\x1b]0;x\\x07\\x9b2J\\r\\x00é👩‍🚀"
