"""Pages that are written from the code: `python -m reference` (or `make docs`) makes them anew, in docs/."""
