"""`paged keys`: makes what schedulers, executors and clients know each other by."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paged.cli import secret_files, token_files
from paged.cli.answers import AsJson
from paged.roles import Role

app = typer.Typer(no_args_is_help=True, help="Make certificates, CURVE keys and tokens. What is secret has mode 600.")

DAYS = 365
MAX_DAYS = 36_500
MAX_NAME_CHARS = 128

Days = Annotated[int, typer.Option(min=1, max=MAX_DAYS, help="Days until a certificate expires.")]
TokenDays = Annotated[
    float | None, typer.Option(min=0, max=MAX_DAYS, help="Days until it expires; else it never does.")
]
TokenEntries = Annotated[Path, typer.Argument(help="The scheduler's --token-file, which gets the hash alone.")]
Replace = Annotated[bool, typer.Option("--replace", help="Write over the files; services take the new ones up.")]
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@app.command()
def create(
    directory: Annotated[Path, typer.Argument(help="Directory to make, with all of it.")],
    host: Annotated[list[str], typer.Option(help="Name or address that clients know schedulers by; may be repeated.")],
    days: Days = DAYS,
    as_json: AsJson = False,
) -> None:
    """Make a CA, certificates of scheduler and client, CURVE keys of both services, and an operator's token."""
    with _told():
        from paged.cli.certificates import make_ca, make_certificate
        from paged.cli.curve_keys import make_pair

        tls, curve, allowed = directory / "tls", directory / "curve", directory / "curve" / "allowed"
        for place in (directory, tls, curve, allowed):
            place.mkdir(mode=0o700, parents=True)
        make_ca(tls)
        make_certificate(tls, "server", host, days=days)
        make_certificate(tls, "client", days=days)
        make_pair(curve, "executor")
        public, _ = make_pair(curve, "scheduler")
        secret_files.make(allowed / public.name, public.read_bytes(), secret=False)
        operator = token_files.new_token()
        token_files.append(directory / "tokens.toml", token_files.entry(operator, "operator", list(Role), None, days))
        secret_files.make(directory / "operator.token", f"{operator}\n".encode(), secret=True)
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            mode = f"{file.stat().st_mode & 0o777:o}"
            print(json.dumps({"file": str(file), "mode": mode}) if as_json else f"{mode} {file}")


@app.command()
def token(
    file: TokenEntries,
    name: Annotated[str, typer.Argument(help="Whose it is, for logs.")],
    role: Annotated[list[Role], typer.Option(help="What it may do; may be repeated.")] = [Role.GENERATE],  # noqa: B006
    tenant: Annotated[str | None, typer.Option(help="Tenant of its requests; anybody's if not given.")] = None,
    days: TokenDays = None,
    out: Annotated[Path | None, typer.Option(help="File that gets the token; else it is printed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a bearer token. It is told once: nothing can make it out of the file again."""
    with _told():
        for what, value in (("NAME", name), ("--tenant", tenant or "")):
            if not (value.isascii() and value.isprintable() and len(value) <= MAX_NAME_CHARS):
                raise ValueError(f"{what}: must be at most {MAX_NAME_CHARS} printable ASCII characters")
        made = token_files.new_token()
        if out is not None:
            secret_files.make(out, f"{made}\n".encode(), secret=True)
        token_files.append(file, token_files.entry(made, name, list(dict.fromkeys(role)), tenant, days))
    if as_json:
        print(json.dumps({"name": name, **({"token": made} if out is None else {"file": str(out)})}))
    elif out is None:
        print(made)


@app.command()
def curve(
    directory: Annotated[Path, typer.Argument(help="Directory that gets NAME.key and NAME.key_secret.")],
    name: Annotated[str, typer.Argument(help="Name of the files.")],
    as_json: AsJson = False,
) -> None:
    """Make a CURVE key pair for the plan stream between scheduler and executor."""
    with _told():
        from paged.cli.curve_keys import make_pair

        _tell(make_pair(directory, _file_name(name)), as_json=as_json)


@app.command()
def certificate(
    directory: Annotated[Path, typer.Argument(help="Directory with ca.pem and ca-key.pem; gets the new files, too.")],
    name: Annotated[str, typer.Argument(help="Name of the files, and of the client.")],
    host: Annotated[list[str], typer.Option(help="For a server: its name or address; may be repeated.")] = [],  # noqa: B006
    days: Days = DAYS,
    replace: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Make a certificate, a server's with --host and a client's without, from the CA in the directory."""
    with _told():
        from paged.cli.certificates import make_certificate

        _tell(make_certificate(directory, _file_name(name), host, days=days, replace=replace), as_json=as_json)


def _tell(files: Iterable[Path], *, as_json: bool) -> None:
    for file in files:
        print(json.dumps({"file": str(file)}) if as_json else file)


def _file_name(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise ValueError("NAME: must be letters, digits, dots, dashes and underscores, and begin with one of the first")
    return name


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        problem = f"{error.filename} is there already; nothing is written over"
    except (OSError, ValueError) as error:
        problem = str(error)
    else:
        return
    print(f"paged: {problem}", file=sys.stderr)
    raise typer.Exit(1)
