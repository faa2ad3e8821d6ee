"""Ask while schedulers come and go: python examples/retries.py [TARGET]

A target may stand for several schedulers, such as dns:///scheduler:50051 or ipv4:10.0.0.1:50051,10.0.0.2:50051.
"""

import asyncio
import sys

from paged.client import Client, InvalidRequestError, ResourceExhaustedError, Retries, UnavailableError


async def main(target: str) -> None:
    # A request is tried again while nothing of its answer has come: by another scheduler, or later.
    retries = Retries(max_attempts=8, first_pause_s=0.1, longest_pause_s=2.0)
    async with Client(target, retries=retries) as client:
        try:
            answer = await client.complete("Once upon a time", max_tokens=16, timeout_s=30)
            print(answer.text)
        except ResourceExhaustedError as error:
            print(f"all are busy; come back in {error.retry_after_s} s")
        except UnavailableError as error:
            print(f"nobody is there: {error.message}")

        try:
            await client.complete("Once upon a time", temperature=-1)
        except InvalidRequestError as error:  # never tried again: it would be refused again
            for violation in error.violations:
                print(f"{violation.field}: {violation.description}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
