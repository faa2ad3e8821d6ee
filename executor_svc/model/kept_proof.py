"""The proof of a model, kept on disk: how it attends, and what became of its modules.

A file is used only where it is this user's own, writable by nobody else, whole, and of the very key that is asked for
(`executor_svc.model.proof_key`). What is served by it has moreover to give the same results to the bit, in some small
steps, as what was proved.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import PreTrainedModel

from executor_svc.model.fused import HeadRule, Recipe, Replaced
from executor_svc.model.proof import ProvenLayer

log = structlog.get_logger(__name__)

MAX_KEPT = 32  # files; the one unused for longest goes first
_MAX_BYTES = 16 << 20
_SUFFIX = ".json"


class Unusable(Exception):
    """What was kept does not fit; the text says why, in a clause."""


@dataclass(frozen=True, slots=True)
class KeptProof:
    """Layers are named by their place in the model."""

    layers: list[dict[str, Any]]
    recipe: dict[str, Any]

    @classmethod
    def of(cls, model: PreTrainedModel, layers: list[ProvenLayer], recipe: Recipe) -> "KeptProof":
        names = {module: name for name, module in model.named_modules()}
        plain = [
            {field.name: getattr(layer, field.name) for field in fields(layer)}
            | {"module": names[layer.module], "dtype": str(layer.dtype).removeprefix("torch.")}
            for layer in layers
        ]
        return cls(plain, asdict(recipe))

    def layers_of(self, model: PreTrainedModel) -> list[ProvenLayer]:
        """Raises what looking for them raises, where they are not there."""
        return [
            ProvenLayer(
                **plain | {"module": model.get_submodule(plain["module"]), "dtype": getattr(torch, plain["dtype"])}
            )
            for plain in self.layers
        ]

    def as_recipe(self) -> Recipe:
        plain = self.recipe
        replaced = [Replaced(**own) for own in plain["replaced"]]
        head = None if plain["head"] is None else HeadRule(**plain["head"])
        return Recipe(**plain | {"replaced": replaced, "head": head})


def sealed(body: bytes) -> bytes:
    """After a line that tells whether it is whole."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


class ProofFile:
    """Where the proof of one key is, or is to be."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        self._key = key
        self._path = cache_dir.expanduser() / "proofs" / (key + _SUFFIX)

    def read(self) -> KeptProof | None:
        """None where there is none, or none that can be trusted, which a warning says."""
        try:
            return self._read()
        except Unusable as error:
            log.warning("kept_proof_not_used", path=str(self._path), reason=str(error))
            return None

    def _read(self) -> KeptProof | None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unusable(f"it cannot be opened: {error.strerror}") from error
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise Unusable("others than this user may have written it")
            content = file.read(_MAX_BYTES)
        try:
            body = content.partition(b"\n")[2]
            if sealed(body) != content:
                raise Unusable("it is damaged")
            stated = json.loads(body)
            if stated.pop("key") != self._key:
                raise Unusable("it is of another key")
            kept = KeptProof(**stated)
            os.utime(self._path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unusable(f"it cannot be read: {error}") from error
        return kept

    def write(self, proof: KeptProof) -> None:
        """It appears at once and whole, in the place of any that was there; where it cannot be kept, a warning says
        so."""
        body = json.dumps(asdict(proof) | {"key": self._key}).encode()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, suffix=".part")  # readable by this user alone
            try:
                with open(descriptor, "wb") as file:
                    file.write(sealed(body))
                os.replace(name, self._path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            self._drop_unused()
        except OSError as error:
            log.warning("proof_not_kept", path=str(self._path), reason=error.strerror)

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _drop_unused(self) -> None:
        others = []
        for other in self._path.parent.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                others.append((other.stat().st_mtime, other))
        for _, other in sorted(others)[:-MAX_KEPT]:
            if other != self._path:
                other.unlink(missing_ok=True)
