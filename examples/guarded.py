"""Call a scheduler that wants TLS and a token: python examples/guarded.py ADDRESS CA_FILE TOKEN_FILE

docs/security.md makes both files. The token is read again when its file changes.
"""

import asyncio
import sys

from paged.client import Client, UnauthenticatedError, tls_credentials


async def main(address: str, ca_file: str, token_file: str) -> None:
    credentials = tls_credentials(ca_file)
    async with Client(address, credentials=credentials, token_file=token_file) as client:
        answer = await client.complete("Once upon a time", max_tokens=16)
        print(answer.text)

    async with Client(address, credentials=credentials) as client:
        try:
            await client.complete("Once upon a time", max_tokens=16)
        except UnauthenticatedError as error:
            print(f"without a token: {error.code.name}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
