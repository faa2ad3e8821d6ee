"""A chat template can go wrong in any way without harm: C10.2, C10.3."""

import threading
import time

import pytest

from scheduler_svc.errors import InvalidRequest
from scheduler_svc.text.chat import MAX_REASON_CHARS, ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, str]] = HI, **limits: float) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, **limits).render(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must take turns') }}", "roles must take turns"),
        ("{% for %}", "template is broken"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ messages[0].content + 1 }}", "refused by the model's chat template"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{% include 'other' %}", "refused by the model's chat template"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_whatever_a_template_raises_is_a_bad_request(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        render(source)
    assert [violation.field for violation in caught.value.violations] == ["chat"]


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{{ '' }}{% endfor %}{% endfor %}",
        "{% for a in range(99999) recursive %}{% for b in range(9999) %}{% endfor %}{{ loop([1]) if a }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str) -> None:
    begin = time.monotonic()
    with pytest.raises(InvalidRequest, match="busy for more than"):
        render(source, max_render_s=0.2)
    assert time.monotonic() - begin < 30


def test_a_template_that_writes_without_end_is_stopped() -> None:
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        render("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", max_rendered_chars=1000)


def test_an_error_does_not_repeat_a_long_conversation() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception(messages[0].content) }}", [{"role": "user", "content": "x" * 100_000}])
    assert len(str(caught.value)) < MAX_REASON_CHARS + 100


def test_an_error_without_a_message_is_named() -> None:
    with pytest.raises(InvalidRequest, match="refused by the model's chat template: TemplateError"):
        render("{{ raise_exception('') }}")


def test_a_chat_without_messages_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        render("{{ bos_token }}", [])


def test_what_users_write_is_never_a_template() -> None:
    content = "{{ raise_exception('no') }}{% for %}<s>"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


def test_a_template_changes_nothing_for_the_next_conversation() -> None:
    template = ChatTemplate("{% set bos_token = 'x' %}{{ bos_token }}{{ messages | length }}", {"bos_token": "<s>"})
    messages = [dict(HI[0])]
    assert template.render(messages) == template.render(messages) == "x1"
    assert messages == HI


def test_one_template_serves_several_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }},{% endfor %}", {})
    results: dict[int, str] = {}

    def work(i: int) -> None:
        results[i] = template.render([{"role": "user", "content": str(i)}] * 200)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: f"{i}," * 200 for i in range(8)}
