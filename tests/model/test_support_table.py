"""docs/models.md says what the tests show."""

from tests.model.support_table import PAGE, page


def test_the_page_of_models_is_what_the_tests_try():
    assert PAGE.read_text() == page(), "renew it: python -m tests.model.support_table --write"
