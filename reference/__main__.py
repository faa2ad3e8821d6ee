"""Write the pages of docs/ that are made from the code."""

from pathlib import Path

from reference.api import api_page
from reference.settings import settings_page

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"settings.md": settings_page, "api.md": api_page}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    main()
