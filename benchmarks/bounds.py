"""What a benchmark's figures may be at most, and the verdict."""

import json
from collections.abc import Mapping
from typing import Any


def missed(figures: Mapping[str, Any], most: Mapping[str, float]) -> list[str]:
    """Names of the figures that are above their bounds. Of several numbers none may be; what is no number is."""

    def keeps(name: str) -> bool:
        found = figures[name]
        return all(number <= most[name] for number in (found if isinstance(found, list) else [found]))

    return [name for name in most if not keeps(name)]


def tell(figures: Mapping[str, Any], most: Mapping[str, float], *, as_json: bool) -> int:
    """Prints the figures, the bounds that some of them have, and which they miss. Returns the exit code: 1 where any
    is missed."""
    above = missed(figures, most)
    if as_json:
        print(json.dumps({**figures, "bounds": dict(most), "missed": above}))
    else:
        width = max(map(len, figures))
        for name, found in figures.items():
            bound = f"  (at most {most[name]:g}{': MISSED' if name in above else ''})" if name in most else ""
            print(f"{name:>{width}}  {found}{bound}")
    return 1 if above else 0
