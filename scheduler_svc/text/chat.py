"""A conversation as the text that the model was trained on: its own chat template, rendered in a sandbox."""

import datetime
import functools
import json
import time
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.text.bundle import BadBundle, Bundle

MAX_RENDERED_CHARS = 64 << 20
MAX_RENDER_S = 5.0
MAX_REASON_CHARS = 400
# Where a render keeps its clock among the template's variables; no template can spell this name.
_CLOCK = "render clock"


def chat_template_source(bundle: Bundle, tokenizer_config: dict[str, Any]) -> str | None:
    """The bundle's default template, None where it has none.

    chat_template.jinja goes before tokenizer_config.json (one template, or several with names), and that before
    chat_template.json.
    """
    source = bundle.text("chat_template.jinja")
    if source is None:
        source = _default_template(tokenizer_config.get("chat_template"))
    if source is None:
        source = _default_template(bundle.json_object("chat_template.json").get("chat_template"))
    return source


class ChatTemplate:
    """Renders conversations. Safe to use from several threads at once.

    The template comes with the model and may be wrong, slow or endless: a render is bounded in time and size, and
    whatever it raises becomes an InvalidRequest.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        max_rendered_chars: int = MAX_RENDERED_CHARS,
        max_render_s: float = MAX_RENDER_S,
    ) -> None:
        self._source = source
        self._special_tokens = special_tokens
        self._max_rendered_chars = max_rendered_chars
        self._max_render_s = max_render_s

    def render(self, messages: list[dict[str, str]]) -> str:
        """The text up to where the model's turn begins. Each message has `role` and `content`."""
        if not messages:
            raise _refused("has no messages; send at least one")
        clock = _RenderClock(self._max_render_s)
        variables = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            _CLOCK: clock,
        }
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(variables):
                clock.check()
                num_chars += len(piece)
                if num_chars > self._max_rendered_chars:
                    raise _refused(f"makes the chat template write more than {self._max_rendered_chars} characters")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise _refused(
                f"cannot be used with this model, whose chat template is broken: {_reason(error)}"
            ) from error
        except Exception as error:  # a template can raise anything that Python can
            raise _refused(f"is refused by the model's chat template: {_reason(error)}") from error
        return "".join(pieces)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        # Not at load: a model with a broken template can still serve text.
        tree = _ENVIRONMENT.parse(self._source)
        for loop in tree.find_all(nodes.For):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick))
        return jinja2.Template.from_code(_ENVIRONMENT, _ENVIRONMENT.compile(tree), _ENVIRONMENT.make_globals(None))


class _RenderClock:
    """Stops a render that takes too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at_s = time.monotonic() + limit_s

    def check(self) -> None:
        if time.monotonic() > self._ends_at_s:
            raise _refused(f"keeps the model's chat template busy for more than {self._limit_s:g} s")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock at every call; each turn of a loop makes one."""

    def tick(self) -> None:
        """What loops call."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Positional names as in the base class: a template's call may have any keyword.
        __context.parent[_CLOCK].check()
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the model writes, for those who train it. Here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 the base class has it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    elif isinstance(value, dict):
        value = value.get("default")
    if value is not None and not isinstance(value, str):
        raise BadBundle(f"the model's chat template is a {type(value).__name__}, not a text")
    return value


def _reason(error: Exception) -> str:
    # A template may quote a whole conversation; an error travels in headers, which are small.
    return (str(error) or type(error).__name__)[:MAX_REASON_CHARS]


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation("chat", reason))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
