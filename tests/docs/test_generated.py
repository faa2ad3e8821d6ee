"""Pages that are made from the code say what the code says."""

import re
from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import BaseSettings

from paged.v1 import control_pb2, inference_pb2
from reference import settings
from reference.__main__ import DOCS, PAGES
from reference.markdown import cell, plain
from reference.settings import SERVICES, UnknownUnit, settings_page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", list(PAGES))
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), f"docs/{name} is stale; run: make docs"


def test_every_setting_of_both_services_is_there() -> None:
    page = (DOCS / "settings.md").read_text()
    for service in SERVICES.values():
        for name in service.model_fields:
            variable = service.model_config["env_prefix"] + name.upper()
            assert f"| `--{name.replace('_', '-')}` | `{variable}` |" in page


def test_every_method_message_field_and_value_of_the_public_protos_is_there() -> None:
    page = (DOCS / "api.md").read_text()
    for file in (inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            for method in service.methods:
                assert f"### {method.name}\n" in page
        for message in file.message_types_by_name.values():
            section = page.partition(f"### {message.name}\n")[2].partition("\n### ")[0]
            for field in message.fields:
                assert f"| `{field.name}` |" in section, f"{message.name}.{field.name}"
        for enum in file.enum_types_by_name.values():
            assert all(f"| `{value.name}` | {value.number} |" in page for value in enum.values)


def test_comments_of_the_protos_are_there_and_linked_types_are_headings() -> None:
    page = (DOCS / "api.md").read_text()
    assert "Ends running or waiting requests; their calls end with CANCELLED." in page
    headings = {heading.lower().replace(".", "") for heading in re.findall(r"^### (\S+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= headings


def test_a_number_without_a_unit_is_not_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class More(BaseSettings):
        how_many: int = Field(3, description="Who knows.")

    monkeypatch.setattr(settings, "SERVICES", {"more": More})
    with pytest.raises(UnknownUnit, match="how_many"):
        settings_page()


def test_markup_in_comments_is_text() -> None:
    assert plain("a*b <s> [0, 1) `x|y` max_tokens") == r"a\*b &lt;s&gt; \[0, 1) `x\|y` max_tokens"
    assert cell("one\ntwo\n\nthree | four") == r"one two<br>three \| four"
